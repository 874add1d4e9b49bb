"""Custom roles with the least permissions, as `gcloud iam roles create ID --project P --file FILE` reads them. Pure.

Source: IAM, "Create and manage custom roles"; Compute Engine, "Roles and permissions" of each method;
Cloud Storage, "IAM permissions for XML requests".
"""

from __future__ import annotations

from typing import Any

MACHINES = (  # what laptop and dispatcher do with machines, zones, prices
    "compute.acceleratorTypes.list", "compute.advice.capacity", "compute.advice.capacityHistory",
    "compute.disks.create", "compute.disks.setLabels", "compute.disks.use", "compute.globalOperations.get",
    "compute.globalOperations.list", "compute.images.get", "compute.images.getFromFamily",
    "compute.images.useReadOnly", "compute.instances.create", "compute.instances.delete", "compute.instances.get",
    "compute.instances.list", "compute.instances.setLabels", "compute.instances.setMetadata",
    "compute.instances.setScheduling", "compute.instances.setServiceAccount", "compute.instances.setTags",
    "compute.instances.start", "compute.machineTypes.list", "compute.networks.get", "compute.networks.use",
    "compute.projects.get", "compute.regionOperations.get", "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp", "compute.zoneOperations.get", "compute.zoneOperations.list",
    "compute.zones.list",
)
LAPTOP = (*MACHINES, "compute.disks.delete", "compute.disks.list", "compute.firewalls.create",
          "compute.firewalls.delete", "compute.firewalls.get", "compute.firewalls.list", "compute.firewalls.update",
          "compute.instances.simulateMaintenanceEvent", "compute.networks.updatePolicy", "compute.regions.get",
          "compute.regions.list", "compute.routers.list", "iam.serviceAccounts.actAs", "iam.serviceAccounts.get",
          "resourcemanager.projects.get", "serviceusage.services.get", "serviceusage.services.list")
DISPATCHER = (*MACHINES, "iam.serviceAccounts.actAs")
BUCKET = ("storage.multipartUploads.abort", "storage.multipartUploads.create", "storage.objects.create",
          "storage.objects.delete", "storage.objects.get", "storage.objects.list")


def document(role: str) -> dict[str, Any]:
    """Return the definition of a role: "laptop", "dispatcher" or "host"."""
    found: tuple[str, ...] = {"laptop": LAPTOP, "dispatcher": DISPATCHER, "host": BUCKET}[role]
    return {"title": f"spotfleet {role}", "description": f"Permissions of spotfleet's {role}", "stage": "GA",
            "includedPermissions": sorted(found)}
