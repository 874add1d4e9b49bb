"""The file system of an instance of Google Cloud before its first boot: that of `aws_machines`, on other firmware.

Its firmware says that this is Google Compute Engine, /etc/hosts knows the metadata server, and after cloud-init a
stand-in of Google's guest agent runs the item `startup-script` at each boot.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.fakes.aws.catalog import UBUNTU
from tests.support.fakes.aws_machines import image as plain
from tests.support.fakes.gcp import InstanceView, catalog

HOST = "metadata.google.internal"
PRODUCT = "Google Compute Engine"
AGENT, AGENT_LOG = "/usr/local/lib/guest-agent", "/var/log/startup-script.log"
SDKS = ("google/cloud/compute_v1", "google/auth", "googleapiclient")
AGENT_TEXT = f"""import os, subprocess, sys, urllib.error, urllib.request
url = "http://{HOST}/computeMetadata/v1/instance/attributes/startup-script"
try:
    asked = urllib.request.Request(url, headers={{"Metadata-Flavor": "Google"}})
    script = urllib.request.urlopen(asked, timeout=10).read()
except urllib.error.HTTPError:
    sys.exit(0)
path = "/run/startup-script"
with open(path, "wb") as file:
    file.write(script)
os.chmod(path, 0o700)
with open("{AGENT_LOG}", "ab") as log:
    sys.exit(subprocess.run([path], stdout=log, stderr=log).returncode)
"""
DMI = {"product_name": PRODUCT, "sys_vendor": "Google", "product_serial": "GoogleCloud-0123456789ABCDEF",
       "product_uuid": "01234567-89ab-cdef-0123-456789abcdef", "chassis_asset_tag": ""}
DMIDECODE = f"""#!/bin/sh
case $2 in
system-product-name) echo {PRODUCT} ;;
system-serial-number) echo {DMI["product_serial"]} ;;
*) echo Google ;;
esac
"""
CLOUD_CFG = {**plain.CLOUD_CFG, "datasource_list": ["GCE"],
             "datasource": {"GCE": {"retries": 3, "sec_between_retries": 1}}}


@dataclass(frozen=True)
class _Plain:
    """What the other image reads of a view."""

    image: str = UBUNTU
    type: str = ""


def spec(view: InstanceView, bare: bool) -> dict[str, Any]:
    found = plain.spec(_Plain(), bare)  # type: ignore[arg-type]
    found["files"] |= {
        "/etc/hosts": (f"127.0.0.1 localhost\n::1 localhost\n169.254.169.254 {HOST} metadata\n", 0o644),
        "/etc/cloud/cloud.cfg": (f"#cloud-config\n{yaml.safe_dump(CLOUD_CFG, sort_keys=False)}", 0o644),
        "/usr/sbin/dmidecode": (DMIDECODE, 0o755), AGENT: (AGENT_TEXT, 0o755),
        plain.BOOT: (plain.BOOT_TEXT.replace("--mode=final\n", f"--mode=final\npython3 {AGENT}\n"), 0o755)}
    if any(i.driver and i.name == view.image for i in catalog.IMAGES):
        lines = [f"echo '{n}, 00000000:00:0{n + 4:X}.0, 0'" for n in range(view.accelerator[1])]
        text = "\n".join(["#!/bin/sh", *(lines or ["echo 'No devices were found'"]), ""])
        found["files"]["/usr/bin/nvidia-smi"] = (text, 0o755)
    if "/sys/class/dmi/id" in found["masks"]:
        found["masks"]["/sys/class/dmi/id"] = {name: f"{text}\n" for name, text in DMI.items()}
    # where this machine has no firmware to show through, its environment says where it runs, as google-auth allows
    found["door"] = [part for word in found["door"] for part in (
        (f"GCE_METADATA_HOST={HOST}", word) if word == "LANG=C.UTF-8" else (word,))]
    if bare:
        folder = sysconfig.get_path("purelib")
        found["masks"] |= {f"{folder}/{name}": {"__init__.py": plain.MISSING} for name in SDKS}
    return found
