# `override_during` needs Terraform 1.11; the module itself does not.

mock_provider "azurerm" {
  override_during = plan

  mock_data "azurerm_client_config" {
    defaults = { subscription_id = "11111111-2222-3333-4444-555555555555" }
  }
  mock_resource "azurerm_virtual_network" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Network/virtualNetworks/spotfleet-research" }
  }
  mock_resource "azurerm_subnet" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Network/virtualNetworks/spotfleet-research/subnets/spotfleet-research" }
  }
  mock_resource "azurerm_storage_container" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Storage/storageAccounts/sfresearch/blobServices/default/containers/spotfleet-research" }
  }
  mock_resource "azurerm_user_assigned_identity" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.ManagedIdentity/userAssignedIdentities/x", principal_id = "p", client_id = "c" }
  }
  mock_resource "azurerm_application_security_group" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Network/applicationSecurityGroups/x" }
  }
  mock_resource "azurerm_linux_virtual_machine" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Compute/virtualMachines/x", private_ip_address = "10.60.0.4", public_ip_address = "203.0.113.9" }
  }
  mock_resource "azurerm_managed_disk" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Compute/disks/x" }
  }
  mock_resource "azurerm_linux_virtual_machine_scale_set" {
    defaults = { id = "/subscriptions/s/resourceGroups/spotfleet-research/providers/Microsoft.Compute/virtualMachineScaleSets/x" }
  }
}

variables {
  name   = "research"
  region = "eastus"
}

run "defaults" {
  command = plan

  assert {
    condition     = azurerm_subnet.this[0].default_outbound_access_enabled == false && length(azurerm_nat_gateway.this) == 1
    error_message = "machines without public addresses leave through the NAT gateway alone"
  }
  assert {
    condition     = length(azurerm_network_security_rule.ssh) == 0 && azurerm_network_security_rule.nothing_else[0].access == "Deny"
    error_message = "SSH is open, and nobody asked for it"
  }
  assert {
    condition = alltrue([
      !azurerm_storage_account.checkpoints[0].shared_access_key_enabled,
      !azurerm_storage_account.checkpoints[0].allow_nested_items_to_be_public,
      azurerm_storage_account.checkpoints[0].https_traffic_only_enabled,
      azurerm_storage_account.checkpoints[0].infrastructure_encryption_enabled,
      azurerm_storage_container.checkpoints[0].container_access_type == "private",
    ])
    error_message = "the storage account may become public, or takes keys"
  }
  assert {
    condition     = can(regex("^[a-z0-9]{3,24}$", azurerm_storage_account.checkpoints[0].name))
    error_message = "the storage account's name is ${azurerm_storage_account.checkpoints[0].name}"
  }
  assert {
    condition     = azurerm_role_assignment.dispatcher["machines"].scope == "/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/spotfleet-research"
    error_message = "the dispatcher's rights on machines end at the resource group"
  }
  assert {
    condition     = azurerm_role_assignment.checkpoints["host"].scope == azurerm_storage_container.checkpoints[0].id
    error_message = "hosts have rights on the container alone"
  }
  assert {
    condition     = output.spotfleet.checkpoints == "az://spotfleet-research/spotfleet" && output.spotfleet.dispatcher == null && output.spotfleet.worker_group == null
    error_message = "output spotfleet: ${jsonencode(output.spotfleet)}"
  }
}

run "existing_network" {
  command = plan

  variables {
    resource_group = "training"
    network        = "/subscriptions/s/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/training"
    subnets        = ["/subscriptions/s/resourceGroups/net/providers/Microsoft.Network/virtualNetworks/training/subnets/gpu"]
    bucket         = "/subscriptions/s/resourceGroups/data/providers/Microsoft.Storage/storageAccounts/acme/blobServices/default/containers/checkpoints"
  }
  assert {
    condition     = length(azurerm_resource_group.this) + length(azurerm_virtual_network.this) + length(azurerm_network_security_group.this) + length(azurerm_storage_account.checkpoints) == 0
    error_message = "something is made though it exists already"
  }
  assert {
    condition     = azurerm_role_definition.dispatcher["subnet"].scope == "/subscriptions/s/resourceGroups/net" && azurerm_role_definition.checkpoints.scope == "/subscriptions/s/resourceGroups/data"
    error_message = "roles belong to the groups of the network and of the storage account"
  }
  assert {
    condition     = output.spotfleet.checkpoints == "az://checkpoints/spotfleet" && output.storage_account == "acme"
    error_message = "output spotfleet: ${jsonencode(output.spotfleet)}"
  }
}

run "complete" {
  command = plan

  variables {
    zones            = ["1", "2"]
    public_addresses = true
    ssh_cidrs        = ["203.0.113.0/24"]
    checkpoint_days  = 90
    disk_key         = "/subscriptions/s/resourceGroups/keys/providers/Microsoft.Compute/diskEncryptionSets/k"
    dispatcher       = { ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" }
    image            = "/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/spotfleet-gpu"
    worker_group     = { hosts = 4, gpu = "T4", ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" }
    tags             = { team = "vision" }
  }
  assert {
    condition     = azurerm_network_security_rule.ssh[0].source_address_prefixes == toset(["203.0.113.0/24"]) && azurerm_network_security_rule.ssh[0].destination_port_range == "22"
    error_message = "SSH is let in to dispatchers, from ssh_cidrs alone"
  }
  assert {
    condition = alltrue([
      azurerm_linux_virtual_machine.dispatcher[0].os_disk[0].disk_encryption_set_id == var.disk_key,
      azurerm_linux_virtual_machine.dispatcher[0].encryption_at_host_enabled,
      azurerm_managed_disk.dispatcher[0].disk_encryption_set_id == var.disk_key,
      azurerm_linux_virtual_machine_scale_set.workers[0].os_disk[0].disk_encryption_set_id == var.disk_key,
      azurerm_linux_virtual_machine_scale_set.workers[0].encryption_at_host_enabled,
    ])
    error_message = "a disk does not have the key"
  }
  assert {
    condition     = azurerm_linux_virtual_machine.dispatcher[0].disable_password_authentication && azurerm_linux_virtual_machine_scale_set.workers[0].disable_password_authentication
    error_message = "a machine takes passwords"
  }
  assert {
    condition     = azurerm_linux_virtual_machine_scale_set.workers[0].sku == "Standard_NC4as_T4_v3" && azurerm_linux_virtual_machine_scale_set.workers[0].priority == "Spot" && azurerm_linux_virtual_machine_scale_set.workers[0].eviction_policy == "Deallocate"
    error_message = "the group is no Spot group of T4 machines"
  }
  assert {
    condition     = azurerm_linux_virtual_machine_scale_set.workers[0].termination_notification[0].enabled
    error_message = "machines of the group get no notice"
  }
  assert {
    condition     = output.spotfleet.dispatcher.public_ip == "203.0.113.9" && output.spotfleet.worker_group.kind == "scale-set"
    error_message = "output spotfleet: ${jsonencode(output.spotfleet)}"
  }
  assert {
    condition     = !contains(keys(azurerm_linux_virtual_machine.dispatcher[0].tags), "spotfleet") && azurerm_linux_virtual_machine.dispatcher[0].tags["spotfleet-managed-by"] == "terraform"
    error_message = "the tag spotfleet is a fleet's own: nothing of Terraform's may have it"
  }
}

run "managed_image" {
  command = plan

  variables {
    dispatcher       = { ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" }
    dispatcher_image = "/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/spotfleet-cpu"
  }
  assert {
    condition     = !azurerm_linux_virtual_machine.dispatcher[0].secure_boot_enabled && !azurerm_linux_virtual_machine.dispatcher[0].vtpm_enabled
    error_message = "Azure refuses trusted launch of a managed image"
  }
}

run "image_of_a_gallery" {
  command = plan

  variables {
    dispatcher       = { ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA you@laptop" }
    dispatcher_image = "/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/galleries/g/images/spotfleet-cpu"
  }
  assert {
    condition     = azurerm_linux_virtual_machine.dispatcher[0].secure_boot_enabled && azurerm_linux_virtual_machine.dispatcher[0].vtpm_enabled
    error_message = "the dispatcher starts without secure boot"
  }
}
