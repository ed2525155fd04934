"""Deploy hil's agent to a board over a shell, and remove it.

All files are in one directory on the board that only its owner can read::

    packages/NAME-VERSION-DIGEST/   files of a wheel or of hil; immutable and shared by agents
    agents/BUILD, agents/current    contents of an agent, and the last started agent
    run/                            agent.sock, agent.pid, agent.log, deploy.lock
    store/                          the agent's blobs and programs
    hil.txt                         marks hil's directory; without this file, hil neither uses nor removes files
"""
