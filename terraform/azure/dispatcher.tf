locals {
  # Azure refuses trusted launch of a managed image, which is what Packer makes; images of a gallery have it.
  dispatcher_managed_image = can(regex("/providers/Microsoft.Compute/images/", var.dispatcher_image))
}

resource "azurerm_public_ip" "dispatcher" {
  count = var.dispatcher != null && var.public_addresses ? 1 : 0

  name                = "${local.full_name}-dispatcher"
  resource_group_name = local.group
  location            = var.region
  allocation_method   = "Static"
  sku                 = "Standard"
  zones               = length(var.zones) > 0 ? [var.zones[0]] : null
  tags                = local.tags
}

resource "azurerm_network_interface" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  name                = "${local.full_name}-dispatcher"
  resource_group_name = local.group
  location            = var.region
  tags                = local.tags

  ip_configuration {
    name                          = "main"
    subnet_id                     = local.subnets[0]
    private_ip_address_allocation = "Dynamic"
    public_ip_address_id          = var.public_addresses ? azurerm_public_ip.dispatcher[0].id : null
  }
}

resource "azurerm_network_interface_application_security_group_association" "dispatcher" {
  for_each = var.dispatcher == null ? {} : azurerm_application_security_group.this

  network_interface_id          = azurerm_network_interface.dispatcher[0].id
  application_security_group_id = each.value.id
}

# The state outlives the machine: a new machine gets the same disk.
resource "azurerm_managed_disk" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  name                          = "${local.full_name}-state"
  resource_group_name           = local.group
  location                      = var.region
  zone                          = length(var.zones) > 0 ? var.zones[0] : null
  storage_account_type          = "Premium_LRS"
  create_option                 = "Empty"
  disk_size_gb                  = var.dispatcher.state_disk_gib
  disk_encryption_set_id        = var.disk_key == "" ? null : var.disk_key
  public_network_access_enabled = false
  network_access_policy         = "DenyAll"
  tags                          = local.tags

  lifecycle {
    prevent_destroy = true # Azure keeps no snapshot: README.md, "Removing it"
  }
}

resource "azurerm_linux_virtual_machine" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  name                            = "${local.full_name}-dispatcher"
  resource_group_name             = local.group
  location                        = var.region
  zone                            = length(var.zones) > 0 ? var.zones[0] : null
  size                            = var.dispatcher.size
  admin_username                  = var.dispatcher.user
  disable_password_authentication = true
  network_interface_ids           = [azurerm_network_interface.dispatcher[0].id]
  encryption_at_host_enabled      = true
  secure_boot_enabled             = !local.dispatcher_managed_image
  vtpm_enabled                    = !local.dispatcher_managed_image
  custom_data = base64encode(templatefile("${path.module}/data/dispatcher.cloud-config.tftpl", {
    device = "/dev/disk/azure/scsi1/lun10"
    user   = var.dispatcher.user
  }))
  source_image_id = var.dispatcher_image == "" ? null : var.dispatcher_image
  tags            = local.tags

  admin_ssh_key {
    username   = var.dispatcher.user
    public_key = var.dispatcher.ssh_public_key
  }

  os_disk {
    caching                = "ReadWrite"
    storage_account_type   = "Premium_LRS"
    disk_size_gb           = var.dispatcher_disk_gib
    disk_encryption_set_id = var.disk_key == "" ? null : var.disk_key
  }

  dynamic "source_image_reference" {
    for_each = var.dispatcher_image == "" ? [local.ubuntu] : []
    content {
      publisher = source_image_reference.value.publisher
      offer     = source_image_reference.value.offer
      sku       = source_image_reference.value.sku
      version   = source_image_reference.value.version
    }
  }

  identity {
    type         = "UserAssigned"
    identity_ids = [azurerm_user_assigned_identity.this["dispatcher"].id]
  }

  lifecycle {
    ignore_changes = [custom_data] # only a first boot reads it: another release's replaces no machine
  }
}

resource "azurerm_virtual_machine_data_disk_attachment" "dispatcher" {
  count = var.dispatcher == null ? 0 : 1

  managed_disk_id    = azurerm_managed_disk.dispatcher[0].id
  virtual_machine_id = azurerm_linux_virtual_machine.dispatcher[0].id
  lun                = 10
  caching            = "None"
}
