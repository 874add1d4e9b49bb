# The values of hosts as `spotfleet up` launches them, for other tools. No provisioning model: who launches decides it.
resource "google_compute_instance_template" "host" {
  project      = var.project
  name_prefix  = "${local.full_name}-"
  description  = "Hosts of fleets on base ${var.name}"
  region       = var.region
  machine_type = var.machine_type
  labels       = local.labels
  tags         = [local.tag]
  metadata     = local.host_metadata

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
    automatic_restart   = false
    on_host_maintenance = local.has_gpu ? "TERMINATE" : "MIGRATE"
  }

  service_account {
    email  = google_service_account.this["host"].email
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  lifecycle {
    create_before_destroy = true
  }
}
