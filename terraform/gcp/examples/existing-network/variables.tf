variable "project" {
  description = "Id of the project, such as `my-project-123`."
  type        = string
}

variable "region" {
  description = "Region of the base, such as `us-central1`."
  type        = string
}

variable "network" {
  description = "Name of the network, or `projects/HOST/global/networks/NAME` of a shared VPC."
  type        = string
}

variable "subnet" {
  description = "Name of its subnet in the region, or `projects/HOST/regions/REGION/subnetworks/NAME`."
  type        = string
}

variable "bucket" {
  description = "Name of a bucket with uniform bucket-level access, for checkpoints."
  type        = string
}
