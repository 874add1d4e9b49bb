"""Messages between command line, dispatcher, agents and workers, and their versions. Pure.

`messages.py` holds every message, `versions.py` the comparison of versions. The transports are:

- Worker and agent: Unix socket, JSON lines.
- Agent and dispatcher: WebSocket `/v1/agent`, one JSON text frame per message. Reports are sent on change and each
  second, orders on change and each 5 s.
- Command line and dispatcher: HTTPS with `Authorization: Bearer TOKEN`; for machines with sshd inside SSH
  (`ssh/tunnel.py`), where the dispatcher takes the admin token only from its own machine (`admin_from_here`). Requests
  and answers carry `X-Spotfleet: PROTOCOL RELEASE`. Another protocol is refused with the fix, except for the routes
  that `down` needs (`versions.py`). The routes are in `dispatcher/http/__init__.py`.

Each host's process starts as `python -m spotfleet.agent --home DIR` or `python -m spotfleet.dispatcher --home DIR`, and
reads `DIR/boot.json`:

- Agent (`agent/boot.py`): `{fleet, host, provider, slots, dispatcher: "https://ADDRESS:PORT", ca: PEM, token,
  orphan_after_s, lifetime_s, target}`.
- Dispatcher (`transport/boot.py`): `{fleet, host, spec, provider_config, fleet_secret, admin_token, ca, cert, key,
  admin_from_here, archive, webhook}`. A host's token is `HOST.` and HMAC-SHA256(fleet_secret, HOST) in hex. `archive`
  is the folder where an autostop leaves ledger, logs and outputs.
- `provider_config` for machines over SSH (`api/lifecycle/ssh_machines.py`): `{ssh, environment, known_hosts, script,
  side, private_key, public_key}`, with the pinned host keys, the text of the discovery script, and the fleet's own key.
- `provider_config` in a cloud: JSON values that its plugin makes and reads (on AWS `providers/aws/plugin.py`), and
  `public_key, secret, private_key`, which `api/cloud.py` adds; host keys are derived from `secret`. `section` is the
  fleet file's with the chosen region and without the laptop's profile; releases before November 2026 had it as JSON
  text under `aws`, and in `spec` as `aws`.

Code reaches machines as a wheel. Over SSH, the dispatcher's wheel is copied by SFTP. The dispatcher stores it among its
bundles (`dispatcher/disk/wheel.py`), and hosts fetch it by digest with their token before they have an agent. In a
cloud, the laptop sends it to the dispatcher over OpenSSH once its sshd shows the host key derived for it
(`api/lifecycle/first_contact.py`).

Exit status 0 of a host's process means that its machine is to be switched off, which ends its bill: hosts do so when
they are orphans, too old or refused; a dispatcher as the last resort, when its fleet goes down and the cloud does not
answer. After any other status the machine starts the process again. A machine that a cloud lent and whose bootstrap has
failed switches itself off 15 minutes later.
"""
