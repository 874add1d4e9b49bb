"""Jobs that are started anew at each change: scripts for torchrun, Horovod's without elastic.run, commands."""
