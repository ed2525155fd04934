"""Putting hil's agent on a board that is reached by a shell only, and taking it away again.

On the board everything lies in one folder that only its owner may read::

    packages/NAME-VERSION-DIGEST/   a wheel's files, or hil's own; never changed, shared by the agents
    agents/BUILD, agents/current    what an agent consists of, and which was started last
    run/                            agent.sock, agent.pid, agent.log, deploy.lock
    store/                          the agent's blobs and programs
    hil.txt                         says that all this is hil's; without it nothing there is used or removed
"""
