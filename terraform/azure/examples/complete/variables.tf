variable "subscription_id" {
  description = "Id of the subscription, as `az account show` prints it."
  type        = string
}

variable "region" {
  description = "Region of the base, such as `eastus`."
  type        = string
}

variable "ssh_cidrs" {
  description = "Networks that you come from, such as `[\"203.0.113.0/24\"]`."
  type        = list(string)
}

variable "disk_key" {
  description = "Id of a disk encryption set in the region."
  type        = string
}

variable "ssh_public_key" {
  description = "Line of a .pub file, for the machines that Terraform keeps."
  type        = string
}

variable "image" {
  description = "Id of an image with NVIDIA's driver, as /subscriptions/.../images/NAME."
  type        = string
}
