"""Find boards, connect to them, deploy the agent, run programs, and recover boards."""
