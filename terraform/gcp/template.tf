locals {
  # `host` has the values of hosts as `spotfleet up` launches them, for other tools. It has no provisioning model: who
  # launches decides it. A managed instance group needs one in its template, so `group` is another.
  templates = merge(
    { host = { suffix = "", purpose = "Hosts of fleets", spot = null, ssh_keys = {} } },
    var.worker_group == null ? {} : {
      group = {
        suffix   = "group-"
        purpose  = "Machines of the worker group"
        spot     = var.worker_group.spot
        ssh_keys = { "ssh-keys" = "${var.worker_group.user}:${var.worker_group.ssh_public_key}" }
      }
    },
  )
}

resource "google_compute_instance_template" "this" {
  for_each = local.templates

  project      = var.project
  name_prefix  = "${local.full_name}-${each.value.suffix}"
  description  = "${each.value.purpose} on base ${var.name}"
  region       = var.region
  machine_type = var.machine_type
  labels       = local.labels
  tags         = [local.tag]
  metadata     = merge(local.host_metadata, each.value.ssh_keys)

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
    provisioning_model          = each.value.spot == null ? null : each.value.spot ? "SPOT" : "STANDARD"
    preemptible                 = each.value.spot
    automatic_restart           = false
    on_host_maintenance         = each.value.spot == true || local.has_gpu ? "TERMINATE" : "MIGRATE"
    instance_termination_action = each.value.spot == true ? "STOP" : null
  }

  service_account {
    email  = google_service_account.this["host"].email
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  lifecycle {
    create_before_destroy = true
  }
}
