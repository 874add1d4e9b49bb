locals {
  spotfleet = {
    version             = local.contract
    module              = local.version
    provider            = "gcp"
    name                = var.name
    account             = var.project
    region              = var.region
    network             = local.network
    subnets             = local.subnets
    public_addresses    = var.public_addresses
    firewall            = { hosts = [local.tag], dispatcher = [local.door_tag] }
    identities          = { hosts = google_service_account.this["host"].email, dispatcher = google_service_account.this["dispatcher"].email }
    checkpoints         = local.checkpoints
    queue               = ""
    image               = var.image
    dispatcher_image    = var.dispatcher_image
    disk_gib            = var.disk_gib
    dispatcher_disk_gib = var.dispatcher_disk_gib
    disk_key            = var.disk_key
    launch_template     = { id = google_compute_instance_template.this["host"].id, version = "" }
    dispatcher = one([for machine in google_compute_instance.dispatcher : {
      id         = machine.id
      private_ip = machine.network_interface[0].network_ip
      public_ip  = try(machine.network_interface[0].access_config[0].nat_ip, "")
      disk       = google_compute_disk.dispatcher[0].id
    }])
    worker_group = one([for group in google_compute_region_instance_group_manager.workers : {
      kind = "managed-instance-group"
      id   = group.id
    }])
    tags = { "spotfleet-base" = var.name }
  }
}

output "spotfleet" {
  description = "The base, for `spotfleet up --from-terraform`."
  value       = local.spotfleet
}

output "network" {
  description = "Network of the machines, as projects/PROJECT/global/networks/NAME."
  value       = local.network
}

output "subnets" {
  description = "Subnet of the machines, as a list of one."
  value       = local.subnets
}

output "service_accounts" {
  description = "E-mail addresses of the service accounts of dispatchers and hosts."
  value       = { for role, account in google_service_account.this : role => account.email }
}

output "checkpoints" {
  description = "URL for `checkpoint: {target: ...}` of a fleet file."
  value       = local.checkpoints
}
