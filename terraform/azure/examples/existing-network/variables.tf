variable "subscription_id" {
  description = "Id of the subscription, as `az account show` prints it."
  type        = string
}

variable "region" {
  description = "Region of the base, such as `eastus`."
  type        = string
}

variable "resource_group" {
  description = "Name of an existing resource group, for machines alone."
  type        = string
}

variable "network" {
  description = "Id of the virtual network."
  type        = string
}

variable "subnet" {
  description = "Name of its subnet for the machines."
  type        = string
}

variable "container" {
  description = "Id of the storage container for checkpoints."
  type        = string
}
