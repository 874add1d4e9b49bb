output "spotfleet" {
  description = "The base, as the modules of all clouds describe theirs. spotfleet has no provider for Azure yet that would read it."
  value = {
    version             = local.contract
    module              = local.version
    provider            = "azure"
    name                = var.name
    account             = local.subscription
    region              = var.region
    network             = local.network
    subnets             = local.subnets
    public_addresses    = var.public_addresses
    firewall            = { hosts = [azurerm_application_security_group.this["hosts"].id], dispatcher = [azurerm_application_security_group.this["dispatcher"].id] }
    identities          = { hosts = azurerm_user_assigned_identity.this["host"].id, dispatcher = azurerm_user_assigned_identity.this["dispatcher"].id }
    checkpoints         = "az://${local.container}/${var.checkpoint_prefix}"
    queue               = ""
    image               = var.image
    dispatcher_image    = var.dispatcher_image
    disk_gib            = var.disk_gib
    dispatcher_disk_gib = var.dispatcher_disk_gib
    disk_key            = var.disk_key
    launch_template     = { id = "", version = "" } # Azure has none
    dispatcher = one([for machine in azurerm_linux_virtual_machine.dispatcher : {
      id         = machine.id
      private_ip = machine.private_ip_address
      public_ip  = var.public_addresses ? machine.public_ip_address : ""
      disk       = azurerm_managed_disk.dispatcher[0].id
    }])
    worker_group = one([for group in azurerm_linux_virtual_machine_scale_set.workers : {
      kind = "scale-set"
      id   = group.id
    }])
    tags = { "spotfleet-base" = var.name }
  }
}

output "resource_group" {
  description = "Name of the resource group of the base."
  value       = local.group
}

output "network" {
  description = "Id of the virtual network."
  value       = local.network
}

output "subnets" {
  description = "Id of the machines' subnet, as a list of one."
  value       = local.subnets
}

output "storage_account" {
  description = "Name of the storage account with the checkpoints, for AZURE_STORAGE_ACCOUNT_NAME."
  value       = local.storage_account
}

output "identities" {
  description = "Client ids of the identities of dispatchers and hosts."
  value       = { for role, identity in azurerm_user_assigned_identity.this : role => identity.client_id }
}
