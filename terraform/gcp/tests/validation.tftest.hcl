# Each wrong value is refused by its own variable. The texts are checked with the values of mistakes in tests/terraform.

mock_provider "google" {}

variables {
  name    = "research"
  project = "my-project-123"
  region  = "us-central1"
}

run "name_with_capitals" {
  command = plan
  variables { name = "Research" }
  expect_failures = [var.name]
}

run "name_too_long_for_a_service_account" {
  command = plan
  variables { name = "research-and-more" }
  expect_failures = [var.name]
}

run "no_project" {
  command = plan
  variables { project = "" }
  expect_failures = [var.project]
}

run "no_region" {
  command = plan
  variables { region = null }
  expect_failures = [var.region]
}

run "a_zone_as_region" {
  command = plan
  variables { region = "us-central1-a" }
  expect_failures = [var.region]
}

run "zone_of_another_region" {
  command = plan
  variables { zones = ["us-east1-b"] }
  expect_failures = [var.zones]
}

run "network_without_subnet" {
  command = plan
  variables { network = "training" }
  expect_failures = [var.subnets]
}

run "subnet_without_network" {
  command = plan
  variables { subnets = ["training"] }
  expect_failures = [var.subnets]
}

run "subnet_of_another_region" {
  command = plan
  variables {
    network = "training"
    subnets = ["projects/my-project-123/regions/us-east1/subnetworks/training"]
  }
  expect_failures = [var.subnets]
}

run "network_as_url" {
  command = plan
  variables {
    network = "https://www.googleapis.com/compute/v1/projects/p/global/networks/training"
    subnets = ["training"]
  }
  expect_failures = [var.network]
}

run "cidr_without_length" {
  command = plan
  variables { cidr = "10.60.0.0" }
  expect_failures = [var.cidr]
}

run "cidr_with_host_bits" {
  command = plan
  variables { cidr = "10.60.0.1/20" }
  expect_failures = [var.cidr]
}

run "cidr_of_the_internet" {
  command = plan
  variables { cidr = "8.8.0.0/20" }
  expect_failures = [var.cidr]
}

run "ssh_from_everywhere" {
  command = plan
  variables { ssh_cidrs = ["0.0.0.0/0"] }
  expect_failures = [var.ssh_cidrs]
}

run "ssh_from_everywhere_by_ipv6" {
  command = plan
  variables { ssh_cidrs = ["::/0"] }
  expect_failures = [var.ssh_cidrs]
}

run "ssh_from_everywhere_in_halves" {
  command = plan
  variables { ssh_cidrs = ["0.0.0.0/1", "128.0.0.0/1"] }
  expect_failures = [var.ssh_cidrs]
}

run "ssh_from_no_network" {
  command = plan
  variables { ssh_cidrs = ["office"] }
  expect_failures = [var.ssh_cidrs]
}

run "public_addresses_that_nobody_reaches" {
  command = plan
  variables { public_addresses = true }
  expect_failures = [var.public_addresses]
}

run "bucket_as_url" {
  command = plan
  variables { bucket = "gs://acme-checkpoints" }
  expect_failures = [var.bucket]
}

run "prefix_with_slash" {
  command = plan
  variables { checkpoint_prefix = "/spotfleet/" }
  expect_failures = [var.checkpoint_prefix]
}

run "days_before_today" {
  command = plan
  variables { checkpoint_days = -1 }
  expect_failures = [var.checkpoint_days]
}

run "key_by_its_name" {
  command = plan
  variables { disk_key = "my-key" }
  expect_failures = [var.disk_key]
}

run "image_by_its_name" {
  command = plan
  variables { image = "ubuntu-2404" }
  expect_failures = [var.image]
}

run "dispatcher_image_by_its_name" {
  command = plan
  variables { dispatcher_image = "ubuntu-2404" }
  expect_failures = [var.dispatcher_image]
}

run "disk_too_small" {
  command = plan
  variables { disk_gib = 5 }
  expect_failures = [var.disk_gib]
}

run "dispatcher_disk_of_half_a_gib" {
  command = plan
  variables { dispatcher_disk_gib = 30.5 }
  expect_failures = [var.dispatcher_disk_gib]
}

run "machine_type_without_size" {
  command = plan
  variables { machine_type = "g2" }
  expect_failures = [var.machine_type]
}

run "unknown_gpu" {
  command = plan
  variables {
    machine_type = "n1-standard-8"
    gpu          = { type = "nvidia-tesla-t5" }
  }
  expect_failures = [var.gpu]
}

run "three_gpus" {
  command = plan
  variables {
    machine_type = "n1-standard-8"
    gpu          = { type = "nvidia-tesla-t4", count = 3 }
  }
  expect_failures = [var.gpu]
}

run "gpu_on_a_type_that_has_its_own" {
  command = plan
  variables { gpu = { type = "nvidia-tesla-t4" } }
  expect_failures = [var.gpu]
}

run "everybody_as_operator" {
  command = plan
  variables { operators = ["allUsers"] }
  expect_failures = [var.operators]
}

run "zero_hosts" {
  command = plan
  variables { worker_group = { hosts = 0, ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" } }
  expect_failures = [var.worker_group]
}

run "private_key_for_the_group" {
  command = plan
  variables { worker_group = { hosts = 2, ssh_public_key = "-----BEGIN OPENSSH PRIVATE KEY-----" } }
  expect_failures = [var.worker_group]
}

run "no_key_for_the_dispatcher" {
  command = plan
  variables { dispatcher = { ssh_public_key = "" } }
  expect_failures = [var.dispatcher]
}

run "no_disk_for_the_dispatcher" {
  command = plan
  variables { dispatcher = { ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA", state_disk_gib = 0 } }
  expect_failures = [var.dispatcher]
}

run "label_with_capitals" {
  command = plan
  variables { labels = { Team = "vision" } }
  expect_failures = [var.labels]
}

run "label_of_ours" {
  command = plan
  variables { labels = { spotfleet = "mine" } }
  expect_failures = [var.labels]
}
