locals {
  version  = "0.1.0" # of this module, the same as spotfleet's
  contract = 1       # version of the output `spotfleet`

  full_name = "spotfleet-${var.name}"
  tag       = local.full_name # network tag of every machine of a fleet on this base
  door_tag  = "${local.full_name}-door"
  labels    = merge(var.labels, { "spotfleet-base" = var.name, "spotfleet-managed-by" = "terraform" })
  roles     = jsondecode(file("${path.module}/data/roles.json"))
  role_id   = "spotfleet_${replace(var.name, "-", "_")}"

  create_network = var.network == null
  network = local.create_network ? google_compute_network.this[0].id : (
    startswith(var.network, "projects/") ? var.network : "projects/${var.project}/global/networks/${var.network}"
  )
  network_project = split("/", local.create_network ? "projects/${var.project}" : local.network)[1]
  subnets = local.create_network ? [google_compute_subnetwork.this[0].id] : [
    for subnet in var.subnets : startswith(subnet, "projects/") ? subnet : "projects/${local.network_project}/regions/${var.region}/subnetworks/${subnet}"
  ]

  bucket      = var.bucket == null ? google_storage_bucket.checkpoints[0].name : var.bucket
  base_object = "spotfleet-base.json" # where `--discover` looks
  checkpoints = "gs://${local.bucket}/${var.checkpoint_prefix}"

  # The images that the CLI takes where none is named.
  ubuntu           = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
  deep_learning    = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
  has_gpu          = var.gpu != null || can(regex("^(a2|a3|a4|a4x|g2|g4)-", var.machine_type))
  image            = coalesce(var.image, local.has_gpu ? local.deep_learning : local.ubuntu)
  dispatcher_image = coalesce(var.dispatcher_image, local.ubuntu)
  hyperdisk_only   = can(regex("^(a3-ultragpu|a3-megagpu|a3-edgegpu|a4-|a4x-|g4-|n4-|c4-|c4a-|c4d-|m4-)", var.machine_type))
  disk_type        = local.hyperdisk_only ? "hyperdisk-balanced" : "pd-balanced"

  # OS Login would hide the keys of the fleet, and keys of the project would open its machines to others.
  metadata = { "enable-oslogin" = "FALSE", "block-project-ssh-keys" = "TRUE" }
  host_metadata = merge(
    local.metadata,
    { "shutdown-script" = "#!/bin/sh\n: >/run/spotfleet-going\n" }, # second witness of a preemption
    local.has_gpu ? { "install-nvidia-driver" = "True" } : {},
  )
}
