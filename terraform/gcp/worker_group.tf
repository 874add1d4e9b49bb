# A group needs the market in its template, so it has one of its own.
resource "google_compute_instance_template" "group" {
  count = var.worker_group == null ? 0 : 1

  project      = var.project
  name_prefix  = "${local.full_name}-group-"
  description  = "Machines of the worker group on base ${var.name}"
  region       = var.region
  machine_type = var.machine_type
  labels       = local.labels
  tags         = [local.tag]
  metadata     = merge(local.host_metadata, { "ssh-keys" = "${var.worker_group.user}:${var.worker_group.ssh_public_key}" })

  disk {
    boot         = true
    auto_delete  = true
    source_image = local.image
    disk_size_gb = var.disk_gib
    disk_type    = local.disk_type
    labels       = local.labels

    dynamic "disk_encryption_key" {
      for_each = var.disk_key == "" ? [] : [var.disk_key]
      content {
        kms_key_self_link = disk_encryption_key.value
      }
    }
  }

  network_interface {
    subnetwork = local.subnets[0]

    dynamic "access_config" {
      for_each = var.public_addresses ? [1] : []
      content {}
    }
  }

  dynamic "guest_accelerator" {
    for_each = var.gpu == null ? [] : [var.gpu]
    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    provisioning_model          = var.worker_group.spot ? "SPOT" : "STANDARD"
    preemptible                 = var.worker_group.spot
    automatic_restart           = false
    on_host_maintenance         = var.worker_group.spot || local.has_gpu ? "TERMINATE" : "MIGRATE"
    instance_termination_action = var.worker_group.spot ? "STOP" : null
  }

  service_account {
    email  = google_service_account.this["host"].email
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_region_instance_group_manager" "workers" {
  count = var.worker_group == null ? 0 : 1

  project                          = var.project
  name                             = "${local.full_name}-workers"
  region                           = var.region
  base_instance_name               = "${local.full_name}-worker"
  target_size                      = var.worker_group.hosts
  distribution_policy_zones        = length(var.zones) > 0 ? var.zones : null
  distribution_policy_target_shape = "ANY"

  version {
    instance_template = google_compute_instance_template.group[0].id
  }

  update_policy {
    type                         = "OPPORTUNISTIC" # a new template ends no machine that trains
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = max(1, length(var.zones) > 0 ? length(var.zones) : 3)
  }

  lifecycle {
    ignore_changes = [target_size] # resized by you, not back by the next apply
  }
}
