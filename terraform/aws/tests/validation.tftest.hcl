# Each mistake is refused by the module itself.

mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { id = "us-east-1", name = "us-east-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1a", "us-east-1b", "us-east-1c"] }
  }
}

variables {
  name   = "research"
  region = "us-east-1"
}

run "name_with_capitals" {
  command = plan
  variables {
    name = "Research_Team"
  }
  expect_failures = [var.name]
}

run "name_that_makes_roles_too_long" {
  command = plan
  variables {
    name = "research-and-development-x"
  }
  expect_failures = [var.name]
}

run "no_region" {
  command = plan
  variables {
    region = null
  }
  expect_failures = [var.region]
}

run "zone_for_a_region" {
  command = plan
  variables {
    region = "us-east-1a"
  }
  expect_failures = [var.region]
}

run "region_of_another_provider" {
  command = plan
  variables {
    region = "us-west-2"
  }
  expect_failures = [data.aws_region.current]
}

run "ssh_from_everywhere" {
  command = plan
  variables {
    ssh_cidrs = ["0.0.0.0/0"]
  }
  expect_failures = [var.ssh_cidrs]
}

run "ssh_from_everywhere_by_ipv6" {
  command = plan
  variables {
    ssh_cidrs = ["203.0.113.7/32", "::/0"]
  }
  expect_failures = [var.ssh_cidrs]
}

run "ssh_from_an_address_without_its_prefix" {
  command = plan
  variables {
    ssh_cidrs = ["203.0.113.7"]
  }
  expect_failures = [var.ssh_cidrs]
}

run "cidr_that_is_none" {
  command = plan
  variables {
    cidr = "10.64.0.0"
  }
  expect_failures = [var.cidr]
}

run "cidr_within_a_network" {
  command = plan
  variables {
    cidr = "10.64.3.7/16"
  }
  expect_failures = [var.cidr]
}

run "cidr_that_is_too_small" {
  command = plan
  variables {
    cidr = "10.64.0.0/26"
  }
  expect_failures = [var.cidr]
}

run "zones_zero" {
  command = plan
  variables {
    zones = 0
  }
  expect_failures = [var.zones]
}

run "subnets_without_their_vpc" {
  command = plan
  variables {
    subnet_ids = ["subnet-0a1b2c3d4e5f67890"]
  }
  expect_failures = [var.subnet_ids]
}

run "tag_of_ours" {
  command = plan
  variables {
    tags = { spotfleet = "mine" }
  }
  expect_failures = [var.tags]
}

run "bucket_as_url" {
  command = plan
  variables {
    bucket = "s3://acme"
  }
  expect_failures = [var.bucket]
}

run "prefix_that_ends_with_a_slash" {
  command = plan
  variables {
    checkpoint_prefix = "spotfleet/"
  }
  expect_failures = [var.checkpoint_prefix]
}

run "key_by_alias" {
  command = plan
  variables {
    disk_key = "alias/mine"
  }
  expect_failures = [var.disk_key]
}

run "disk_that_is_too_small" {
  command = plan
  variables {
    disk_gib = 4
  }
  expect_failures = [var.disk_gib]
}

run "zero_hosts" {
  command = plan
  variables {
    worker_group = { image = "ami-0a1b2c3d4e5f67890", gpu = "A10G", hosts = 0 }
  }
  expect_failures = [var.worker_group]
}

run "unknown_gpu" {
  command = plan
  variables {
    worker_group = { image = "ami-0a1b2c3d4e5f67890", gpu = "RTX9090", hosts = 2 }
  }
  expect_failures = [var.worker_group]
}

run "group_of_no_type" {
  command = plan
  variables {
    worker_group = { image = "ami-0a1b2c3d4e5f67890", hosts = 2 }
  }
  expect_failures = [var.worker_group]
}

run "dispatcher_without_an_image" {
  command = plan
  variables {
    dispatcher = { image = "ubuntu" }
  }
  expect_failures = [var.dispatcher]
}

run "vpc_by_name" {
  command = plan
  variables {
    vpc_id     = "main"
    subnet_ids = ["subnet-0a1b2c3d4e5f67890"]
  }
  expect_failures = [var.vpc_id]
}

run "image_by_name" {
  command = plan
  variables {
    image = "ubuntu"
  }
  expect_failures = [var.image]
}

run "dispatcher_of_a_user_that_no_image_has" {
  command = plan
  variables {
    dispatcher = { image = "ami-0a1b2c3d4e5f67890", user = "Ubuntu" }
  }
  expect_failures = [var.dispatcher]
}

run "dispatcher_image_by_name" {
  command = plan
  variables {
    dispatcher_image = "ubuntu"
  }
  expect_failures = [var.dispatcher_image]
}

run "dispatcher_disk_of_half_a_gib" {
  command = plan
  variables {
    dispatcher_disk_gib = 30.5
  }
  expect_failures = [var.dispatcher_disk_gib]
}

run "old_versions_for_no_day" {
  command = plan
  variables {
    old_versions_days = 0
  }
  expect_failures = [var.old_versions_days]
}

run "bucket_key_by_id" {
  command = plan
  variables {
    bucket_key = "1234abcd-12ab-34cd-56ef-1234567890ab"
  }
  expect_failures = [var.bucket_key]
}

run "boundary_by_name" {
  command = plan
  variables {
    permissions_boundary = "company"
  }
  expect_failures = [var.permissions_boundary]
}
