variable "project" {
  description = "Id of the project, such as `my-project-123`."
  type        = string
}

variable "region" {
  description = "Region of the base, such as `us-central1`."
  type        = string
}

variable "ssh_cidrs" {
  description = "Networks that you come from, such as `[\"203.0.113.0/24\"]`."
  type        = list(string)
}

variable "operators" {
  description = "Who may run `spotfleet`, such as `[\"group:ml@example.com\"]`."
  type        = list(string)
}

variable "disk_key" {
  description = "Cloud KMS key in the region; the service agents of Compute Engine and Cloud Storage need the right to use it."
  type        = string
}

variable "ssh_public_key" {
  description = "Line of a .pub file, for the machines that Terraform keeps."
  type        = string
}
