# Secure by default, and the parts that variables switch on and off.

mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { id = "us-east-1", name = "us-east-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_ami" {
    defaults = { root_device_name = "/dev/xvda" }
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

run "secure_by_default" {
  command = plan

  assert {
    condition     = aws_launch_template.host.metadata_options[0].http_tokens == "required" && aws_launch_template.host.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "The metadata server answers without a token, or to containers."
  }
  assert {
    condition     = aws_launch_template.host.block_device_mappings[0].device_name == "/dev/sda1"
    error_message = "The disk is not the root of Ubuntu's images."
  }
  assert {
    condition     = tostring(aws_launch_template.host.block_device_mappings[0].ebs[0].encrypted) == "true"
    error_message = "A disk is not encrypted."
  }
  assert {
    condition     = length(aws_launch_template.host.instance_market_options) == 0
    error_message = "The launch template has market options."
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.ssh) == 0
    error_message = "SSH is open though no network is named."
  }
  assert {
    condition     = length(aws_subnet.private) == 3 && length(aws_nat_gateway.this) == 1 && alltrue([for s in aws_subnet.private : !s.map_public_ip_on_launch])
    error_message = "Machines are not in private subnets with a way out."
  }
  assert {
    condition     = aws_s3_bucket_public_access_block.checkpoints[0].restrict_public_buckets && aws_s3_bucket_public_access_block.checkpoints[0].block_public_acls
    error_message = "The bucket may become public."
  }
  assert {
    condition     = !aws_s3_bucket.checkpoints[0].force_destroy
    error_message = "`terraform destroy` would delete checkpoints."
  }
}

run "no_wildcard_rights" {
  command = plan

  assert {
    condition     = alltrue([for policy in values(local.policies) : alltrue([for s in policy.Statement : alltrue([for a in s.Action : !strcontains(a, "*")])])])
    error_message = "A role has a right with a wildcard."
  }
  # Everything that changes an existing resource is bound to the base's tag.
  assert {
    condition = alltrue([
      for s in local.policies.dispatcher.Statement : can(s.Condition.StringEquals["aws:ResourceTag/spotfleet-base"])
      if length(setintersection(toset(s.Action), toset(["ec2:TerminateInstances", "ec2:StopInstances", "ec2:DeleteLaunchTemplate"]))) > 0
    ])
    error_message = "The dispatcher may change machines that are not of this base."
  }
  assert {
    condition     = !anytrue([for s in local.policies.dispatcher.Statement : contains(["UseKey", "LendKey"], s.Sid)])
    error_message = "The dispatcher has rights to keys though no key is named."
  }
}

run "boundary_of_ones_own" {
  command = plan
  variables {
    permissions_boundary = "arn:aws:iam::123456789012:policy/company"
  }
  assert {
    condition     = length(aws_iam_policy.boundary) == 0 && alltrue([for r in aws_iam_role.this : r.permissions_boundary == "arn:aws:iam::123456789012:policy/company"])
    error_message = "The named boundary is not on every role."
  }
}

run "existing_network" {
  command = plan
  variables {
    vpc_id     = "vpc-0a1b2c3d4e5f67890"
    subnet_ids = ["subnet-0a1b2c3d4e5f67890"]
    bucket     = "acme"
  }
  assert {
    condition     = length(aws_vpc.this) + length(aws_subnet.private) + length(aws_subnet.public) + length(aws_nat_gateway.this) + length(aws_s3_bucket.checkpoints) == 0
    error_message = "A part is made that exists already."
  }
  assert {
    condition     = local.contract.network == "vpc-0a1b2c3d4e5f67890" && local.contract.checkpoints == "s3://acme/spotfleet"
    error_message = "The contract does not name the existing parts."
  }
}

run "without_a_queue" {
  command = plan
  variables {
    interruption_queue = false
  }
  assert {
    condition     = length(aws_sqs_queue.interruptions) + length(aws_cloudwatch_event_rule.interruptions) == 0 && local.contract.queue == ""
    error_message = "A queue is made though none is asked for."
  }
  assert {
    condition     = !anytrue([for s in local.policies.dispatcher.Statement : s.Sid == "Hear"])
    error_message = "The dispatcher may read a queue that does not exist."
  }
}

run "with_machines" {
  command = plan
  variables {
    dispatcher   = { image = "ami-0a1b2c3d4e5f67890" }
    worker_group = { image = "ami-0a1b2c3d4e5f67890", gpu = "A10G", hosts = 2, max_hosts = 4 }
    ssh_cidrs    = ["203.0.113.0/24", "2001:db8::/32"]
  }
  override_data {
    target = data.aws_subnet.dispatcher
    values = { availability_zone = "us-east-1a" }
  }
  override_resource {
    target          = aws_ebs_volume.dispatcher
    values          = { id = "vol-0a1b2c3d4e5f67890" }
    override_during = plan # needs Terraform 1.11; the module itself does not
  }
  assert {
    condition     = aws_ebs_volume.dispatcher[0].final_snapshot && aws_volume_attachment.dispatcher[0].stop_instance_before_detaching
    error_message = "The dispatcher's disk goes without a snapshot, or is detached while it is mounted."
  }
  assert {
    condition     = aws_autoscaling_group.workers[0].suspended_processes == toset(["AZRebalance"]) && aws_autoscaling_group.workers[0].wait_for_capacity_timeout == "0"
    error_message = "The group ends machines that train, or a lack of spot capacity fails its creation."
  }
  assert {
    condition     = aws_ebs_volume.dispatcher[0].encrypted && aws_ebs_volume.dispatcher[0].size == 50
    error_message = "The dispatcher has no encrypted disk of its own."
  }
  assert {
    condition     = aws_launch_template.host.block_device_mappings[0].device_name == "/dev/xvda"
    error_message = "The encrypted disk is not the root of the group's image, but a second one."
  }
  assert {
    condition     = aws_autoscaling_group.workers[0].desired_capacity == 2 && aws_autoscaling_group.workers[0].max_size == 4
    error_message = "The group has another size than asked for."
  }
  assert {
    condition     = aws_autoscaling_group.workers[0].mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0
    error_message = "The group's machines are not spot machines."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.ssh["2001:db8::/32"].cidr_ipv6 == "2001:db8::/32" && aws_vpc_security_group_ingress_rule.ssh["203.0.113.0/24"].cidr_ipv4 == "203.0.113.0/24"
    error_message = "SSH is not let in from the named networks."
  }
}
