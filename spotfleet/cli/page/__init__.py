"""The live page: a small web server on this machine alone, which asks the dispatcher on behalf of the browser.

    browser <--HTTP on loopback, server-sent events-- `spotfleet page` --TLS, admin token, tunnel--> dispatcher

    command.py  the commands `page` and `metrics`
    feed.py     one poll after the other; viewers get the whole state first and then what changed
    server.py   the address with its secret, the page's files, logs, and actions if they are allowed
    page.html page.css page.js   the page, without libraries

The admin token stays in this process. The browser has the secret of the address, which ends with the process.
"""
