"""HTTP API of the dispatcher: server, authentication and routes.

    app.py            routes, access rules, errors            requests.py    callers, bodies, query values
    auth.py           tokens                                  revocation.py  refused hosts
    agents.py         WebSocket of agents                     version_check.py  agents of another protocol
    listener.py       sockets, TLS                            admission.py      bound of connections without a token
    failed_start.py   the reason of a dispatcher that cannot start
    host_work.py      threads and limits for the work of hosts' requests
    fleet.py jobs.py bundles.py archive.py  handlers

Every request except GET /healthz carries `Authorization: Bearer TOKEN`. The routes (`app.py: ROUTES`):

| method and path | caller | request and answer |
|---|---|---|
| GET /healthz | all | liveness, without authentication; contains nothing else |
| GET /v1/agent | agent | WebSocket: receives AgentReport, sends AgentOrders; replaces a host with another protocol |
| GET /v1/status | CLI | FleetStatus: fleet, hosts, jobs, each with `why`; burn |
| GET /v1/events?after=SEQ&wait=S | CLI | `{"events": [{"seq", "kind", "at", ...}]}`, long poll |
| GET /v1/live?after=SEQ&since=T | CLI | `{now, status, events, last, series}`: all that the page shows; T is Unix |
| GET /metrics | metrics, CLI | OpenMetrics text, see `live/metrics.py`; the metrics token is taken from any machine |
| PUT /v1/nodes | CLI | `{min, target, max}` |
| PUT /v1/policy | CLI | model.PolicySpec |
| PUT /v1/notify | CLI | `{notify: NotifySpec, webhook: URL}` |
| HEAD, GET, PUT /v1/bundles/SHA256 | CLI, agent | a blob of a working directory, see below |
| POST /v1/bundles/missing | CLI, agent | `{digests}` -> `{missing}` |
| POST /v1/jobs | CLI | `{spec: JobSpec, secrets, wait}` -> `{job}` |
| GET /v1/jobs | CLI | `{jobs: [JobStatus]}` |
| GET /v1/ended?keep=N&after=JOB | CLI | `{jobs: [EndedJob], more}`: ended jobs, oldest first, without the newest N |
| POST /v1/prune | CLI | `{jobs}` -> `{pruned}`: removes the files of ended jobs |
| GET /v1/jobs/JOB | CLI | JobStatus |
| POST /v1/jobs/JOB/cancel | CLI | ends the job |
| GET /v1/jobs/JOB/launch | agent | WorkerLaunch; only for a host with a worker of the job |
| GET /v1/jobs/JOB/workers | CLI | `{workers}`: the workers that have logs |
| GET /v1/jobs/JOB/logs?offset=B&wait=S | CLI | bytes of a log, long poll; also `rank=N` or `worker=W`, see below |
| GET /v1/jobs/JOB/logs/start?tail=N&since=S | CLI | `{offset}`: where the last N lines, or S seconds, begin |
| POST /v1/jobs/JOB/logs/WORKER?offset=B | agent | appends if `offset` is the size held -> `{size}` |
| PUT /v1/jobs/JOB/checkpoints/VERSION | agent | a checkpoint or a part of one, see below -> Checkpoint |
| GET /v1/jobs/JOB/checkpoints/VERSION | CLI, agent | the file of the checkpoint |
| POST /v1/jobs/JOB/folder/WORKER?generation=G | agent | manifest of the checkpoint folder -> `{missing}`: pieces |
| POST /v1/jobs/JOB/outputs/WORKER | agent | pieces of the worker's outputs, see below -> `{held}` |
| GET /v1/jobs/JOB/outputs | CLI | .tar.gz of all outputs collected so far; for the release before |
| POST /v1/jobs/JOB/fetched | CLI | `{at}`: all outputs of the manifest of that time have been copied |
| POST /v1/hosts/HOST/drain | CLI | drains the host |
| POST /v1/hosts/HOST/revoke | CLI | `{why}`: the token is refused from this answer on, permanently |
| POST /v1/hosts/HOST/interrupt | CLI | `{notice_s: number or null}`, for `chaos` |
| POST /v1/hosts/HOST/failed | its machine | `{why, broken}`: it cannot become a host; `bootstrap/fetch.py` |
| POST /v1/gangs/HOST | gang | `{hosts}` -> `{token, host_key}` of a member that has not joined; `bootstrap/gang.py` |
| POST /v1/down | CLI | cancels jobs, drains and ends all spot hosts; /v1/status shows when none is left |
| GET /v1/archive/manifest | CLI | names, sizes and digests of the archive's files, see `protocol/archive.py` |
| GET /v1/archive/files/KEY | CLI | a file of the archive, or a range of it (`Range`) |
| POST /v1/archive/ranges | CLI | `{ranges: [[key, start, end], ...]}` -> their bytes, one after the other |
| GET /v1/archive | CLI | .tar.gz of ledger.db, logs, newest checkpoints and outputs; for the release before |

- Bundles: a blob is a manifest or one of its pieces. A host gets and puts blobs of the jobs that it works for, and
  gets the wheel of the code.
- Logs: `worker` may be `HOST#setup`; without it `rank` counts (default 0). The answer's header `X-Offset` is the next
  offset, `X-End: 1` marks the end. WORKER in the path of a POST may be `HOST#setup`, too.
- Checkpoints: `?generation=G&digest=SHA256&name=FILE` for one file of a checkpoint, and `&part=I&parts=N` if its writer
  is one of N <= 4096; without `name` a tar, as earlier releases sent it. A body with another digest is not stored
  (400). Older generations, and files of a checkpoint older than the newest kept, are refused (409). 507: no room on the
  disk.
- Folder: only from rank 0 of the newest round (409 otherwise). The missing pieces are put as bundles; then the same
  request again makes it the job's newest.
- Archive: `?outputs=JOB` means the outputs of one job only. With `Accept-Encoding: deflate` logs and the ledger are
  deflated. 404 for a range that a key does not have any more: the caller asks for the manifest again.
- Outputs: the body is that of `messages.pack_pieces`. 413: beyond the limits of a worker; 507: no room on the disk;
  403: a worker that the job never had; 503: too many requests of this host are here, or its agent has not reported yet.
"""
