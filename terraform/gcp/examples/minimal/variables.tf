variable "project" {
  description = "Id of the project, such as `my-project-123`."
  type        = string
}

variable "region" {
  description = "Region of the base, such as `us-central1`."
  type        = string
}
