# Two groups: every machine of a fleet is in `hosts`; the dispatcher is in `dispatcher`, too.

resource "aws_security_group" "hosts" {
  name        = local.names.hosts_group
  description = local.base.groups.hosts.description
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = local.names.hosts_group })

  lifecycle {
    ignore_changes = [description] # another text would replace the group, which machines hold
  }
}

resource "aws_vpc_security_group_ingress_rule" "hosts_from_each_other" {
  security_group_id            = aws_security_group.hosts.id
  description                  = "machines of the fleet, on every port"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.hosts.id
  tags                         = local.tags
}

# The rule for outbound IP traffic does not cover EFA, so this one is not redundant.
resource "aws_vpc_security_group_egress_rule" "hosts_to_each_other" {
  security_group_id            = aws_security_group.hosts.id
  description                  = "machines of the fleet, on every port, EFA included"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.hosts.id
  tags                         = local.tags
}

resource "aws_vpc_security_group_egress_rule" "hosts_out" {
  security_group_id = aws_security_group.hosts.id
  description       = "packages, datasets, checkpoints, the API of AWS"
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
  tags              = local.tags
}

resource "aws_security_group" "dispatcher" {
  name        = local.names.dispatcher_group
  description = local.base.groups.dispatcher.description
  vpc_id      = local.vpc_id
  tags        = merge(local.tags, { Name = local.names.dispatcher_group })

  lifecycle {
    ignore_changes = [description] # another text would replace the group, which machines hold
  }
}

resource "aws_vpc_security_group_ingress_rule" "ssh" {
  for_each          = toset(var.ssh_cidrs)
  security_group_id = aws_security_group.dispatcher.id
  description       = "SSH to the dispatcher"
  ip_protocol       = "tcp"
  from_port         = local.base.groups.dispatcher.port
  to_port           = local.base.groups.dispatcher.port
  cidr_ipv4         = strcontains(each.value, ":") ? null : each.value
  cidr_ipv6         = strcontains(each.value, ":") ? each.value : null
  tags              = local.tags
}

resource "aws_vpc_security_group_egress_rule" "dispatcher_out" {
  security_group_id = aws_security_group.dispatcher.id
  description       = "packages, the API of AWS"
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
  tags              = local.tags
}
