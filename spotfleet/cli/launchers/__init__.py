"""Commands for users of other launchers: `launch` as SkyPilot's, `horovodrun` as Horovod's, `convert` for their files.
Each is made of the commands and the API that exist besides."""
