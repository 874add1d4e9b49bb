# `override_during` needs Terraform 1.11; the module itself does not.

mock_provider "google" {
  override_during = plan

  mock_resource "google_compute_network" {
    defaults = { id = "projects/my-project-123/global/networks/spotfleet-research" }
  }
  mock_resource "google_compute_subnetwork" {
    defaults = { id = "projects/my-project-123/regions/us-central1/subnetworks/spotfleet-research" }
  }
  mock_resource "google_compute_instance_template" {
    defaults = { id = "projects/my-project-123/global/instanceTemplates/spotfleet-research-1" }
  }
  mock_resource "google_compute_disk" {
    defaults = { id = "projects/my-project-123/zones/us-central1-b/disks/spotfleet-research-state" }
  }
  mock_resource "google_compute_instance" {
    defaults = { id = "projects/my-project-123/zones/us-central1-b/instances/spotfleet-research-dispatcher" }
  }
  mock_resource "google_compute_region_instance_group_manager" {
    defaults = { id = "projects/my-project-123/regions/us-central1/instanceGroupManagers/spotfleet-research-workers" }
  }
}

override_resource {
  target          = google_service_account.this["host"]
  override_during = plan
  values          = { email = "sf-research-host@my-project-123.iam.gserviceaccount.com" }
}

override_resource {
  target          = google_service_account.this["dispatcher"]
  override_during = plan
  values          = { email = "sf-research-dispatcher@my-project-123.iam.gserviceaccount.com" }
}

variables {
  name    = "research"
  project = "my-project-123"
  region  = "us-central1"
}

run "defaults" {
  command = plan

  assert {
    condition     = google_compute_subnetwork.this[0].private_ip_google_access && length(google_compute_router_nat.this) == 1
    error_message = "machines without public addresses need Cloud NAT and Google's private access"
  }
  assert {
    condition     = length(google_compute_firewall.ssh) == 0
    error_message = "SSH is open, and nobody asked for it"
  }
  assert {
    condition     = google_compute_firewall.inside[0].source_ranges == null
    error_message = "traffic inside a fleet is let in by network tag alone"
  }
  assert {
    condition     = length(google_compute_instance_template.this["host"].network_interface[0].access_config) == 0
    error_message = "machines are private unless public_addresses is true"
  }
  assert {
    condition     = google_compute_instance_template.this["host"].scheduling[0].provisioning_model == null
    error_message = "the template decides on a market"
  }
  assert {
    condition     = google_storage_bucket.checkpoints[0].public_access_prevention == "enforced" && google_storage_bucket.checkpoints[0].uniform_bucket_level_access
    error_message = "the bucket may become public"
  }
  assert {
    condition     = google_storage_bucket.checkpoints[0].versioning[0].enabled && length(google_storage_bucket.checkpoints[0].lifecycle_rule) == 2 && google_storage_bucket.checkpoints[0].soft_delete_policy[0].retention_duration_seconds == 0
    error_message = "old versions are kept, and removed after a week"
  }
  assert {
    condition     = output.spotfleet.checkpoints == "gs://spotfleet-research-my-project-123/spotfleet" && output.spotfleet.dispatcher == null && output.spotfleet.worker_group == null
    error_message = "output spotfleet: ${jsonencode(output.spotfleet)}"
  }
  assert {
    condition     = jsondecode(google_storage_bucket_object.base[0].content).identities.hosts == "sf-research-host@my-project-123.iam.gserviceaccount.com"
    error_message = "the bucket's description of the base differs from the output"
  }
}

run "existing_network" {
  command = plan

  variables {
    network = "training"
    subnets = ["training-us"]
    bucket  = "acme-checkpoints"
  }
  assert {
    condition     = length(google_compute_network.this) == 0 && length(google_compute_router.this) == 0 && length(google_storage_bucket.checkpoints) == 0
    error_message = "something is made though it exists already"
  }
  assert {
    condition     = output.spotfleet.subnets == ["projects/my-project-123/regions/us-central1/subnetworks/training-us"] && output.spotfleet.network == "projects/my-project-123/global/networks/training"
    error_message = "output spotfleet: ${jsonencode(output.spotfleet)}"
  }
  assert {
    condition     = output.spotfleet.checkpoints == "gs://acme-checkpoints/spotfleet" && google_storage_bucket_iam_member.checkpoints["host"].bucket == "acme-checkpoints"
    error_message = "hosts have no access to the existing bucket"
  }
}

run "shared_vpc" {
  command = plan

  variables {
    network = "projects/acme-net/global/networks/training"
    subnets = ["projects/acme-net/regions/us-central1/subnetworks/training-us"]
  }
  assert {
    condition     = length(google_compute_firewall.inside) == 0
    error_message = "rules of a shared VPC are its host project's"
  }
}

run "complete" {
  command = plan

  variables {
    zones            = ["us-central1-b", "us-central1-c"]
    public_addresses = true
    ssh_cidrs        = ["203.0.113.0/24", "198.51.100.7/32"]
    operators        = ["group:ml@example.com"]
    checkpoint_days  = 90
    disk_key         = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
    machine_type     = "n1-standard-8"
    gpu              = { type = "nvidia-tesla-t4", count = 2 }
    dispatcher       = { ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" }
    worker_group     = { hosts = 4, ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" }
    labels           = { team = "vision" }
  }
  assert {
    condition     = google_compute_firewall.ssh[0].source_ranges == toset(["203.0.113.0/24", "198.51.100.7/32"]) && google_compute_firewall.ssh[0].target_tags == toset(["spotfleet-research-door"])
    error_message = "SSH is let in to dispatchers, from ssh_cidrs alone"
  }
  assert {
    condition     = length(google_compute_router_nat.this) == 0 && length(google_compute_instance_template.this["host"].network_interface[0].access_config) == 1
    error_message = "machines have public addresses"
  }
  assert {
    condition = alltrue([
      google_compute_instance_template.this["host"].disk[0].disk_encryption_key[0].kms_key_self_link == var.disk_key,
      google_compute_instance_template.this["group"].disk[0].disk_encryption_key[0].kms_key_self_link == var.disk_key,
      google_compute_instance.dispatcher[0].boot_disk[0].kms_key_self_link == var.disk_key,
      google_compute_disk.dispatcher[0].disk_encryption_key[0].kms_key_self_link == var.disk_key,
      google_storage_bucket.checkpoints[0].encryption[0].default_kms_key_name == var.disk_key,
    ])
    error_message = "a disk or the bucket does not have the key"
  }
  assert {
    condition     = google_compute_instance_template.this["group"].scheduling[0].provisioning_model == "SPOT" && google_compute_region_instance_group_manager.workers[0].target_size == 4
    error_message = "the group is no Spot group of four"
  }
  assert {
    condition     = google_compute_instance.dispatcher[0].scheduling[0].provisioning_model == "STANDARD" && google_compute_instance.dispatcher[0].zone == google_compute_disk.dispatcher[0].zone
    error_message = "the dispatcher is on demand, in the zone of its disk"
  }
  assert {
    condition     = output.spotfleet.dispatcher.disk == google_compute_disk.dispatcher[0].id && output.spotfleet.worker_group.kind == "managed-instance-group"
    error_message = "output spotfleet: ${jsonencode(output.spotfleet)}"
  }
  assert {
    condition     = !contains(keys(google_compute_instance.dispatcher[0].labels), "spotfleet") && google_compute_instance.dispatcher[0].labels["spotfleet-managed-by"] == "terraform"
    error_message = "`spotfleet down` lists by the label spotfleet: nothing of Terraform's may have it"
  }
}
