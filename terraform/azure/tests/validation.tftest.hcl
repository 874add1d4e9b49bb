# Each wrong value is refused by its own variable. The texts are checked with the values of mistakes in tests/terraform.

mock_provider "azurerm" {}

variables {
  name   = "research"
  region = "eastus"
}

run "name_with_capitals" {
  command = plan
  variables { name = "Research" }
  expect_failures = [var.name]
}

run "name_too_long_for_a_storage_account" {
  command = plan
  variables { name = "research-and-more" }
  expect_failures = [var.name]
}

run "no_region" {
  command = plan
  variables { region = null }
  expect_failures = [var.region]
}

run "region_by_its_long_name" {
  command = plan
  variables { region = "East US" }
  expect_failures = [var.region]
}

run "group_by_its_id" {
  command = plan
  variables { resource_group = "/subscriptions/s/resourceGroups/training" }
  expect_failures = [var.resource_group]
}

run "zone_of_another_cloud" {
  command = plan
  variables { zones = ["us-east1-b"] }
  expect_failures = [var.zones]
}

run "network_by_its_name" {
  command = plan
  variables {
    network = "training"
    subnets = ["training/subnets/gpu"]
  }
  expect_failures = [var.network]
}

run "network_without_subnet" {
  command = plan
  variables { network = "/subscriptions/s/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/training" }
  expect_failures = [var.subnets]
}

run "subnet_without_network" {
  command = plan
  variables { subnets = ["/subscriptions/s/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/training/subnets/gpu"] }
  expect_failures = [var.subnets]
}

run "subnet_of_another_network" {
  command = plan
  variables {
    network = "/subscriptions/s/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/training"
    subnets = ["/subscriptions/s/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/other/subnets/gpu"]
  }
  expect_failures = [var.subnets]
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

run "bucket_by_its_name" {
  command = plan
  variables { bucket = "checkpoints" }
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

run "root_on_the_dispatcher" {
  command = plan
  variables { dispatcher = { ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA", user = "root" } }
  expect_failures = [var.dispatcher]
}

run "zero_hosts" {
  command = plan
  variables {
    image        = "/subscriptions/s/resourceGroups/i/providers/Microsoft.Compute/images/gpu"
    worker_group = { hosts = 0, gpu = "T4", ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" }
  }
  expect_failures = [var.worker_group]
}

run "gpus_without_a_driver" {
  command = plan
  variables { worker_group = { hosts = 2, gpu = "T4", ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" } }
  expect_failures = [var.worker_group]
}

run "unknown_gpu" {
  command = plan
  variables {
    image        = "/subscriptions/s/resourceGroups/i/providers/Microsoft.Compute/images/gpu"
    worker_group = { hosts = 2, gpu = "T5", ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" }
  }
  expect_failures = [var.worker_group]
}

run "neither_gpu_nor_size" {
  command = plan
  variables { worker_group = { hosts = 2, ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" } }
  expect_failures = [var.worker_group]
}

run "size_of_another_cloud" {
  command = plan
  variables { worker_group = { hosts = 2, size = "p4d.24xlarge", ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" } }
  expect_failures = [var.worker_group]
}

run "private_key_for_the_group" {
  command = plan
  variables {
    image        = "/subscriptions/s/resourceGroups/i/providers/Microsoft.Compute/images/gpu"
    worker_group = { hosts = 2, gpu = "T4", ssh_public_key = "-----BEGIN OPENSSH PRIVATE KEY-----" }
  }
  expect_failures = [var.worker_group]
}

run "admin_in_the_group" {
  command = plan
  variables {
    image        = "/subscriptions/s/resourceGroups/i/providers/Microsoft.Compute/images/gpu"
    worker_group = { hosts = 2, gpu = "T4", ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA", user = "admin" }
  }
  expect_failures = [var.worker_group]
}

run "tag_with_slash" {
  command = plan
  variables { tags = { "a/b" = "vision" } }
  expect_failures = [var.tags]
}

run "tag_of_ours" {
  command = plan
  variables { tags = { spotfleet = "mine" } }
  expect_failures = [var.tags]
}
