resource "azurerm_linux_virtual_machine_scale_set" "workers" {
  count = var.worker_group == null ? 0 : 1

  name                            = "${local.full_name}-workers"
  resource_group_name             = local.group
  location                        = var.region
  zones                           = length(var.zones) > 0 ? var.zones : null
  sku                             = var.worker_group.size != null ? var.worker_group.size : local.gpus[var.worker_group.gpu]
  instances                       = var.worker_group.hosts
  priority                        = var.worker_group.spot ? "Spot" : "Regular"
  eviction_policy                 = var.worker_group.spot ? "Deallocate" : null
  max_bid_price                   = var.worker_group.spot ? -1 : null # never evicted for its price
  overprovision                   = false
  upgrade_mode                    = "Manual" # a new image ends no machine that trains
  admin_username                  = var.worker_group.user
  disable_password_authentication = true
  encryption_at_host_enabled      = true
  source_image_id                 = var.image == "" ? null : var.image
  tags                            = local.tags

  admin_ssh_key {
    username   = var.worker_group.user
    public_key = var.worker_group.ssh_public_key
  }

  os_disk {
    caching                = "ReadWrite"
    storage_account_type   = "Premium_LRS"
    disk_size_gb           = var.disk_gib
    disk_encryption_set_id = var.disk_key == "" ? null : var.disk_key
  }

  dynamic "source_image_reference" {
    for_each = var.image == "" ? [local.ubuntu] : []
    content {
      publisher = source_image_reference.value.publisher
      offer     = source_image_reference.value.offer
      sku       = source_image_reference.value.sku
      version   = source_image_reference.value.version
    }
  }

  network_interface {
    name    = "main"
    primary = true

    ip_configuration {
      name                           = "main"
      primary                        = true
      subnet_id                      = local.subnets[0]
      application_security_group_ids = [azurerm_application_security_group.this["hosts"].id]

      dynamic "public_ip_address" {
        for_each = var.public_addresses ? [1] : []
        content {
          name = "main"
        }
      }
    }
  }

  identity {
    type         = "UserAssigned"
    identity_ids = [azurerm_user_assigned_identity.this["host"].id]
  }

  termination_notification {
    enabled = true
    timeout = "PT5M"
  }

  dynamic "spot_restore" {
    for_each = var.worker_group.spot ? [1] : []
    content {
      enabled = true
      timeout = "PT1H"
    }
  }

  lifecycle {
    ignore_changes = [instances] # resized by you, not back by the next apply
  }
}
