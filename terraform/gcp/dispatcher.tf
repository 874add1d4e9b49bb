locals {
  dispatcher_zone = length(var.zones) > 0 ? var.zones[0] : "${var.region}-b"
}

# The state outlives the machine: a new machine gets the same disk. Of a disk that is destroyed a snapshot stays.
resource "google_compute_disk" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  project = var.project
  name    = "${local.full_name}-state"
  zone    = local.dispatcher_zone
  type    = "pd-balanced"
  size    = var.dispatcher.state_disk_gib
  labels  = local.labels

  create_snapshot_before_destroy = true

  dynamic "disk_encryption_key" {
    for_each = var.disk_key == "" ? [] : [var.disk_key]
    content {
      kms_key_self_link = disk_encryption_key.value
    }
  }
}

resource "google_compute_instance" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  project                   = var.project
  name                      = "${local.full_name}-dispatcher"
  zone                      = local.dispatcher_zone
  machine_type              = var.dispatcher.machine_type
  labels                    = local.labels
  tags                      = [local.tag, local.door_tag]
  allow_stopping_for_update = true

  metadata = merge(local.metadata, {
    "ssh-keys" = "${var.dispatcher.user}:${var.dispatcher.ssh_public_key}"
    "user-data" = templatefile("${path.module}/data/dispatcher.cloud-config.tftpl", {
      device = "/dev/disk/by-id/google-spotfleet-state"
      user   = var.dispatcher.user
    })
  })

  boot_disk {
    auto_delete       = true
    kms_key_self_link = var.disk_key == "" ? null : var.disk_key

    initialize_params {
      image  = local.dispatcher_image
      size   = var.dispatcher_disk_gib
      type   = "pd-balanced"
      labels = local.labels
    }
  }

  attached_disk {
    source            = google_compute_disk.dispatcher[0].id
    device_name       = "spotfleet-state"
    kms_key_self_link = var.disk_key == "" ? null : var.disk_key
  }

  network_interface {
    subnetwork = local.subnets[0]

    dynamic "access_config" {
      for_each = var.public_addresses ? [1] : []
      content {}
    }
  }

  scheduling {
    provisioning_model  = "STANDARD"
    automatic_restart   = true
    on_host_maintenance = "MIGRATE"
  }

  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  service_account {
    email  = google_service_account.this["dispatcher"].email
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  lifecycle {
    ignore_changes = [boot_disk[0].initialize_params[0].image] # a newer image of the family replaces no machine
  }
}
