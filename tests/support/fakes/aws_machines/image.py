"""The file system of an instance before its first boot: an Ubuntu cloud image, over this machine's own.

What an image has is Debian's or Ubuntu's: cloud-init, which does all that user data say, sshd without host keys, no
user but root. It boots as systemd would have it: cloud-init's stages in their order, but for the one that brings up the
network, which stands; sshd after the first. There is no systemd, so `systemctl` can switch the machine off and nothing
else. `apt-get` notes what it should have installed in /var/log/installs.log. The firmware says that this is EC2.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from spotfleet.providers.aws.types import DRIVEN
from tests.support.fakes.aws import InstanceView, catalog
from tests.support.network.machine_init import POWER_OFF
from tests.support.network.machines import CHECKOUT, FRESH, SFTP, SSHD, Machine, prefixes

DISK_MIB = 2048
USER = "ubuntu"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT, BOOT_LOG, INSTALLS = "/usr/local/lib/boot", "/var/log/boot.log", "/var/log/installs.log"
EMPTY = (*FRESH, "/var/lib/cloud", "/etc/cloud/cloud.cfg.d", "/etc/ssh/sshd_config.d", "/etc/sudoers.d", "/opt", "/srv",
         "/mnt")
LOGGING = "/etc/cloud/cloud.cfg.d/05_logging.cfg"
SDKS = ("boto3", "botocore", "s3transfer", "moto", "pip")
MISSING = "raise ModuleNotFoundError('this image has none', name=__name__)\n"

BOOT_TEXT = f"""#!/bin/sh
exec >>{BOOT_LOG} 2>&1
echo "boots at $(cat /proc/uptime)"
cloud-init init
mkdir -p /run/sshd
{SSHD} -D -e &
cloud-init modules --mode=config
cloud-init modules --mode=final
echo "has booted at $(cat /proc/uptime)"
wait
"""
SYSTEMCTL = f"""#!/bin/sh
case " $* " in
*" poweroff "* | *" halt "*) kill -{POWER_OFF:d} 1 ;;
*) echo "System has not been booted with systemd as init system (PID 1). Can't operate." >&2; exit 1 ;;
esac
"""
SHUTDOWN = f"""#!/bin/sh
case " $* " in *" -r "* | *" -c "*) echo "not on this machine: shutdown $*" >&2; exit 1 ;; esac
kill -{POWER_OFF:d} 1
"""
UUID = "ec2e1916-9099-7caf-fd21-012345abcdef"  # by which cloud-init knows that it is on EC2, and asks for a token
DMI = {"product_uuid": UUID, "product_serial": UUID, "sys_vendor": "Amazon EC2", "chassis_asset_tag": "Amazon EC2",
       "product_name": "m5.large"}
DMIDECODE = f"""#!/bin/sh
case $2 in
system-uuid | system-serial-number) echo {UUID} ;;
*) echo Amazon EC2 ;;
esac
"""
APT = f"""#!/bin/sh
echo "$0 $*" >>{INSTALLS}
"""
NO_XID = "#!/bin/sh\n"  # `dmesg`: the kernel is this machine's
SUDO = """#!/bin/sh
while :; do
  case $1 in
  -n | -E | -H) shift ;;
  --) shift; break ;;
  -*) echo "sudo: what is $1?" >&2; exit 1 ;;
  *) break ;;
  esac
done
exec su -s /bin/sh root -c 'exec "$0" "$@"' -- "$@"
"""
ANYBODY = "auth sufficient pam_permit.so\naccount sufficient pam_permit.so\nsession optional pam_permit.so\n"
SSHD_CONFIG = f"""Include /etc/ssh/sshd_config.d/*.conf
KbdInteractiveAuthentication no
UsePAM yes
X11Forwarding yes
PrintMotd no
UseDNS no
LogLevel VERBOSE
AcceptEnv LANG LC_*
Subsystem sftp {SFTP}
"""
CLOUD_CFG: dict[str, Any] = {
    "users": ["default"], "disable_root": True, "preserve_hostname": False,
    "datasource_list": ["Ec2"], "datasource": {"Ec2": {"strict_id": False, "metadata_urls": ["http://169.254.169.254"]}},
    "network": {"config": "disabled"},
    "cloud_init_modules": ["seed_random", "bootcmd", "write-files", "set_hostname", "users-groups", "ssh"],
    "cloud_config_modules": ["set-passwords", "runcmd"],
    "cloud_final_modules": ["package-update-upgrade-install", "write-files-deferred", "scripts-per-once",
                            "scripts-per-boot", "scripts-per-instance", "scripts-user", "final-message"],
    "system_info": {
        "distro": "ubuntu",
        "default_user": {"name": USER, "lock_passwd": True, "gecos": "Ubuntu", "shell": "/bin/bash",
                         "sudo": ["ALL=(ALL) NOPASSWD:ALL"]},
        "paths": {"cloud_dir": "/var/lib/cloud/", "templates_dir": "/etc/cloud/templates/"},
        "ssh_svcname": "ssh",
    },
}


def why_not() -> str:
    if shutil.which("cloud-init") is None or not Path(LOGGING).exists():
        return "instances are made by `cloud-init` (Debian: cloud-init)"
    return ""


def spec(view: InstanceView, bare: bool) -> dict[str, Any]:
    """For `machine_init.py`; `bare`: without SDKs of a cloud and whatever installs packages."""
    files = {
        "/etc/hosts": ("127.0.0.1 localhost\n::1 localhost\n", 0o644),
        "/etc/hostname": ("ubuntu\n", 0o644),
        "/etc/resolv.conf": ("nameserver 127.0.0.1\n", 0o644),  # which does not answer
        "/etc/environment": (f'PATH="{PATH}"\n', 0o644),
        "/etc/cloud/cloud.cfg": (f"#cloud-config\n{yaml.safe_dump(CLOUD_CFG, sort_keys=False)}", 0o644),
        LOGGING: (Path(LOGGING).read_text(), 0o644),
        "/etc/ssh/sshd_config": (SSHD_CONFIG, 0o644),
        "/etc/ssh/sshd_config.d/60-cloudimg-settings.conf": ("PasswordAuthentication no\n", 0o600),
        BOOT: (BOOT_TEXT, 0o755),
        "/usr/bin/systemctl": (SYSTEMCTL, 0o755),
        "/usr/sbin/dmidecode": (DMIDECODE, 0o755),
        "/usr/bin/dmesg": (NO_XID, 0o755),
        "/usr/bin/systemd-detect-virt": ("#!/bin/sh\nexit 1\n", 0o755),  # not a container
        **{f"/usr/sbin/{name}": (SHUTDOWN, 0o755) for name in ("shutdown", "poweroff", "halt")},
        **{f"/usr/bin/{name}": (APT, 0o755) for name in ("apt-get", "apt", "eatmydata")},
        **{f"/etc/{name}": (_without_people(name), mode) for name, mode in (("passwd", 0o644), ("shadow", 0o640))},
    }
    if view.image not in (catalog.UBUNTU, catalog.AMAZON_LINUX):
        files["/usr/bin/nvidia-smi"] = (_nvidia_smi(view.type), 0o755)
    if shutil.which("sudo") is None:
        files |= {"/usr/bin/sudo": (SUDO, 0o755), "/etc/pam.d/su": (ANYBODY, 0o644)}
    return {"name": "ubuntu", "fresh": EMPTY, "shared": prefixes(), "linked": [], "masks": _masks(bare),
            "hidden": [str(key) for key in Path("/etc/ssh").glob("ssh_host_*")], "size": f"{DISK_MIB}m", "files": files,
            "folders": ["/run/lock", "/var/log/apt"], "user_id": 0,
            "door": ["/usr/bin/env", "-i", f"PATH={PATH}", "LANG=C.UTF-8", "/bin/sh", BOOT]}


def _nvidia_smi(kind: str) -> str:
    """The driver's tool, which finds the GPUs that it is for."""
    devices = catalog.TYPES[kind].facts.get("GpuInfo", {}).get("Gpus", [])
    count = sum(d["Count"] for d in devices) if kind.partition(".")[0] in DRIVEN else 0
    lines = [f"{number}, 00000000:00:1{number:X}.0, 0" for number in range(count)]
    return "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines or ["No devices were found"])


def _masks(bare: bool) -> dict[str, dict[str, str]]:
    """The code under test comes to a machine as a wheel, from nowhere else."""
    found = {str(CHECKOUT / name): {} for name in ("spotfleet", "tests", "spotfleet.egg-info")}
    if bare:
        libraries = {sysconfig.get_path("purelib"), str(Path(sys.base_prefix, "lib", f"python{sys.version[:4]}"))}
        names = [*SDKS, *(f"site-packages/{name}" for name in SDKS), "ensurepip"]
        found |= {f"{folder}/{name}": {"__init__.py": MISSING} for folder in libraries for name in names}
    found["/sys/class/dmi/id"] = {name: f"{text}\n" for name, text in DMI.items()}
    hidden = tuple(f"{folder}/" for folder in EMPTY)
    return {folder: files for folder, files in found.items() if Path(folder).is_dir()
            and (not folder.startswith(hidden) or folder.startswith(tuple(prefixes())))}


def _without_people(name: str) -> str:
    people = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()
              if 1000 <= int(line.split(":")[2]) < 60000}
    lines = Path("/etc", name).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.split(":")[0] not in people)


def logs(machine: Machine, most: int = 4000) -> str:
    """What it has written down about its boots and our processes."""
    found = []
    for folder in (machine.path("/var/log"), *machine.path("/root/.spotfleet-host").glob("*/")):
        for path in sorted(p for p in folder.iterdir() if p.suffix == ".log" or p.name == "state"):
            with contextlib.suppress(OSError):
                if path.name != "cloud-init.log":
                    found.append(f"--- {path.name}\n{path.read_text(errors='replace')[-most:]}")
    return "\n".join(found)
