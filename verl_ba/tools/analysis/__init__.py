"""Reading rollout dumps and runs, computing, drawing. The command line is in `commands`; each step is a module of its own."""
