"""Terraform's AWS provider as another client of the fake: it makes, reads again, changes nothing, and removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.aws.terraform import Terraform, why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(1800)]

CONFIGURATION = """
data "aws_vpc" "default" { default = true }
data "aws_subnets" "default" {
  filter {
    name   = "vpc-id"
    values = [data.aws_vpc.default.id]
  }
}
data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}
resource "aws_security_group" "hosts" {
  name        = "tf-hosts"
  description = "hosts of a fleet"
  vpc_id      = data.aws_vpc.default.id
  ingress {
    from_port = 0
    to_port   = 0
    protocol  = "-1"
    self      = true
  }
  egress {
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
  tags = { team = "vision" }
}
resource "aws_iam_policy" "boundary" {
  name   = "tf-boundary"
  policy = jsonencode({ Version = "2012-10-17", Statement = [{ Effect = "Allow", Action = "ec2:*", Resource = "*" }] })
}
resource "aws_iam_role" "host" {
  name                 = "tf-host"
  assume_role_policy   = data.aws_iam_policy_document.trust.json
  permissions_boundary = aws_iam_policy.boundary.arn
  tags                 = { team = "vision" }
}
resource "aws_iam_instance_profile" "host" {
  name = "tf-host"
  role = aws_iam_role.host.name
}
resource "aws_launch_template" "host" {
  name          = "tf-host"
  image_id      = "IMAGE"
  instance_type = "m5.large"
  iam_instance_profile { name = aws_iam_instance_profile.host.name }
  metadata_options {
    http_endpoint = "enabled"
    http_tokens   = "required"
  }
  block_device_mappings {
    device_name = "/dev/sda1"
    ebs {
      volume_size           = 30
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
  network_interfaces {
    device_index          = 0
    security_groups       = [aws_security_group.hosts.id]
    delete_on_termination = true
  }
  tags = { team = "vision" }
}
resource "aws_instance" "dispatcher" {
  ami                    = "IMAGE"
  instance_type          = "t3.small"
  subnet_id              = tolist(data.aws_subnets.default.ids)[0]
  vpc_security_group_ids = [aws_security_group.hosts.id]
  iam_instance_profile   = aws_iam_instance_profile.host.name
  metadata_options {
    http_endpoint = "enabled"
    http_tokens   = "required"
  }
  root_block_device {
    volume_size = 30
    volume_type = "gp3"
    encrypted   = true
  }
  tags = { Name = "tf-dispatcher" }
}
"""


def test_a_configuration_is_made_is_read_as_it_was_made_and_is_removed(cloud: Any, tmp_path: Path):
    terraform = Terraform(tmp_path, cloud.url)
    terraform.write(CONFIGURATION.replace("IMAGE", cloud.UBUNTU))
    terraform.run("init", "-input=false")
    terraform.apply()
    (machine,) = cloud.instances()
    assert (machine.type, machine.tags) == ("t3.small", {"Name": "tf-dispatcher"})
    assert sorted(t.kind for t in cloud.everything()) == [
        "instance", "instance-profile", "launch-template", "network-interface", "role", "security-group", "volume"]
    assert terraform.plan() == []
    terraform.destroy()
    assert cloud.everything() == []
    assert not cloud.bugs, cloud.bugs[0]
