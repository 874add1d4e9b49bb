# Application security groups name the machines: `hosts` is every machine of a fleet, `dispatcher` its dispatcher.

resource "azurerm_application_security_group" "this" {
  for_each = toset(["hosts", "dispatcher"])

  name                = "${local.full_name}-${each.key}"
  resource_group_name = local.group
  location            = var.region
  tags                = local.tags
}

resource "azurerm_network_security_group" "this" {
  count = local.create_network ? 1 : 0

  name                = local.full_name
  resource_group_name = local.group
  location            = var.region
  tags                = local.tags
}

resource "azurerm_network_security_rule" "inside" {
  count = local.create_network ? 1 : 0

  name                                       = "inside"
  description                                = "Machines of fleets reach each other on every port"
  resource_group_name                        = local.group
  network_security_group_name                = azurerm_network_security_group.this[0].name
  priority                                   = 100
  direction                                  = "Inbound"
  access                                     = "Allow"
  protocol                                   = "*"
  source_application_security_group_ids      = [azurerm_application_security_group.this["hosts"].id]
  source_port_range                          = "*"
  destination_application_security_group_ids = [azurerm_application_security_group.this["hosts"].id]
  destination_port_range                     = "*"
}

resource "azurerm_network_security_rule" "ssh" {
  count = local.create_network && length(var.ssh_cidrs) > 0 ? 1 : 0

  name                                       = "ssh"
  description                                = "SSH to dispatchers"
  resource_group_name                        = local.group
  network_security_group_name                = azurerm_network_security_group.this[0].name
  priority                                   = 110
  direction                                  = "Inbound"
  access                                     = "Allow"
  protocol                                   = "Tcp"
  source_address_prefixes                    = var.ssh_cidrs
  source_port_range                          = "*"
  destination_application_security_group_ids = [azurerm_application_security_group.this["dispatcher"].id]
  destination_port_range                     = "22"
}

# Azure's own rules let in the whole virtual network and what is peered with it.
resource "azurerm_network_security_rule" "nothing_else" {
  count = local.create_network ? 1 : 0

  name                        = "nothing-else"
  description                 = "Nothing else comes in"
  resource_group_name         = local.group
  network_security_group_name = azurerm_network_security_group.this[0].name
  priority                    = 4096
  direction                   = "Inbound"
  access                      = "Deny"
  protocol                    = "*"
  source_address_prefix       = "*"
  source_port_range           = "*"
  destination_address_prefix  = "*"
  destination_port_range      = "*"
}

resource "azurerm_subnet_network_security_group_association" "this" {
  count = local.create_network ? 1 : 0

  subnet_id                 = azurerm_subnet.this[0].id
  network_security_group_id = azurerm_network_security_group.this[0].id
}
