# Spot machines that EC2 itself replaces. It replaces them by new ones: it has no way to stop and resume one.

locals {
  gpus         = jsondecode(file("${path.module}/data/gpus.json"))
  worker_types = var.worker_group == null ? [] : length(var.worker_group.instance_types) > 0 ? var.worker_group.instance_types : local.gpus[var.worker_group.gpu]
}

resource "aws_autoscaling_group" "workers" {
  count = var.worker_group == null ? 0 : 1

  name                = "${local.names.base}-workers"
  min_size            = 0
  max_size            = coalesce(var.worker_group.max_hosts, var.worker_group.hosts)
  desired_capacity    = var.worker_group.hosts
  vpc_zone_identifier = local.subnet_ids
  capacity_rebalance  = true
  suspended_processes = ["AZRebalance"] # it would end machines that train, to have as many in each zone

  # Spot capacity may take hours. Terraform would give up, and make the whole group anew at the next apply.
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = var.worker_group.on_demand
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.host.id
        version            = aws_launch_template.host.latest_version
      }

      dynamic "override" {
        for_each = local.worker_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = "${local.names.base}-worker" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity] # its size is changed by hand or by a schedule
  }
}
