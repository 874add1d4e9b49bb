variable "subscription_id" {
  description = "Id of the subscription, as `az account show` prints it."
  type        = string
}

variable "region" {
  description = "Region of the base, such as `eastus`."
  type        = string
}
