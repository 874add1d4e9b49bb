from spotfleet.cli import main

main()
