"""Scripts as others write them, through a kill and a notice at three workers: exact, or refused with the line.

    scripts/            stand-ins of our own in the form of well-known scripts, with the edit of docs/scripts.md
    standins.py         their table, with the verdict on each
    files.py            the well-known files, where a folder of them exists, with the edits that make them small
    test_foreign.py     both through spotfleet.verify

The folder of files: $SPOTFLEET_FOREIGN, or shared/data/foreign beside the project. Stand-ins for libraries that the
scripts import, and the data that they read: tests/support/foreign.
"""
