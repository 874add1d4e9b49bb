# Azure has no conditions on the tags of machines: the limit of the dispatcher's rights is the resource group.

resource "azurerm_user_assigned_identity" "this" {
  for_each = toset(["dispatcher", "host"])

  name                = "${local.full_name}-${each.key}"
  resource_group_name = local.group
  location            = var.region
  tags                = local.tags
}

locals {
  machine_actions = [
    "Microsoft.Compute/disks/delete",
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/virtualMachines/deallocate/action",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/virtualMachines/instanceView/read",
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/start/action",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Network/applicationSecurityGroups/joinIpConfiguration/action",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/publicIPAddresses/delete",
    "Microsoft.Network/publicIPAddresses/join/action",
    "Microsoft.Network/publicIPAddresses/read",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Resources/subscriptions/resourceGroups/read",
  ]
  subnet_actions   = ["Microsoft.Network/virtualNetworks/subnets/join/action", "Microsoft.Network/virtualNetworks/subnets/read"]
  identity_actions = ["Microsoft.ManagedIdentity/userAssignedIdentities/assign/action", "Microsoft.ManagedIdentity/userAssignedIdentities/read"]
  account_actions  = ["Microsoft.Compute/locations/usages/read", "Microsoft.Compute/skus/read"]
  blob_actions = [
    "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/delete",
    "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read",
    "Microsoft.Storage/storageAccounts/blobServices/containers/blobs/write",
  ]

  # Each role is assigned to the dispatcher on one thing alone.
  dispatcher_roles = {
    machines = { actions = local.machine_actions, scope = local.group_id, on = local.group_id }
    subnet   = { actions = local.subnet_actions, scope = local.network_group_id, on = local.subnets[0] }
    identity = { actions = local.identity_actions, scope = local.group_id, on = azurerm_user_assigned_identity.this["host"].id }
    account  = { actions = local.account_actions, scope = "/subscriptions/${local.subscription}", on = "/subscriptions/${local.subscription}" }
  }
}

resource "azurerm_role_definition" "dispatcher" {
  for_each = local.dispatcher_roles

  name        = "${local.full_name} dispatcher ${each.key}"
  description = "Rights of spotfleet's dispatcher on base ${var.name}: ${each.key}"
  scope       = each.value.scope

  permissions {
    actions = each.value.actions
  }
}

resource "azurerm_role_assignment" "dispatcher" {
  for_each = local.dispatcher_roles

  scope              = each.value.on
  role_definition_id = azurerm_role_definition.dispatcher[each.key].role_definition_resource_id
  principal_id       = azurerm_user_assigned_identity.this["dispatcher"].principal_id
  principal_type     = "ServicePrincipal"
}

resource "azurerm_role_definition" "checkpoints" {
  name        = "${local.full_name} checkpoints"
  description = "Checkpoints of fleets on base ${var.name}"
  scope       = split("/providers/", local.container_id)[0]

  permissions {
    data_actions = local.blob_actions
  }
}

resource "azurerm_role_assignment" "checkpoints" {
  for_each = azurerm_user_assigned_identity.this

  scope              = local.container_id
  role_definition_id = azurerm_role_definition.checkpoints.role_definition_resource_id
  principal_id       = each.value.principal_id
  principal_type     = "ServicePrincipal"
}
