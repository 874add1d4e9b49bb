"""A real interruption notice for one spot instance, by AWS Fault Injection Service (FIS); leaves nothing behind.

    role /spotfleet/spotfleet-FLEET-fis, tagged --> experiment template --> experiment --> rebalance hint, notice, loss

The role may interrupt spot instances with the fleet's tag and nothing else, and only FIS may take it.
Source: AWS FIS User Guide, "aws:ec2:send-spot-instance-interruptions" and "IAM roles for AWS FIS experiments".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from spotfleet.providers.aws.mapping import names

ACTION = "aws:ec2:send-spot-instance-interruptions"
NOTICE = "PT2M"  # the least: the notice comes at once
USD = 0.40  # $0.10 per minute of an action, which lasts until the instance is gone
SEEN_S = 90.0  # for FIS to be able to take a role that was just made
POLL_S = 3.0
EXTRA = {  # what a user needs for this besides `spotfleet check aws --policy`
    "Version": "2012-10-17",
    "Statement": [
        {"Sid": "Experiments", "Effect": "Allow", "Resource": "*",
         "Action": ["fis:CreateExperimentTemplate", "fis:DeleteExperimentTemplate", "fis:GetExperiment",
                    "fis:StartExperiment", "fis:StopExperiment", "fis:TagResource"]},
        {"Sid": "LendRole", "Effect": "Allow", "Action": "iam:PassRole",
         "Resource": f"arn:aws:iam::*:role{names.IAM_PATH}*",
         "Condition": {"StringEquals": {"iam:PassedToService": "fis.amazonaws.com"}}},
        {"Sid": "LinkedRole", "Effect": "Allow", "Action": "iam:CreateServiceLinkedRole", "Resource": "*",
         "Condition": {"StringEquals": {"iam:AWSServiceName": "fis.amazonaws.com"}}},
    ],
}


@dataclass
class Notices:
    """`role`: the ARN of one that exists; empty: made, and removed by `close`."""

    session: Any  # boto3.Session
    region: str
    fleet: str  # its name in the cloud
    tell: Callable[[str], None]
    role: str = ""
    poll_s: float = POLL_S
    _templates: list[str] = field(default_factory=list)
    _made: str = ""  # name of the role

    def send(self, instance: str) -> str:
        """Begin; the experiment's id. A new role is unknown to FIS for some seconds."""
        account, partition = self._account()
        role = self.role or self._make_role(account, partition)
        arn = f"arn:{partition}:ec2:{self.region}:{account}:instance/{instance}"
        deadline = time.monotonic() + SEEN_S
        while True:
            try:
                return self._start(self._template(role, arn))
            except (ClientError, NotYet) as error:
                if time.monotonic() > deadline:
                    raise
                self.tell(f"FIS does not take it yet: {error}")
                time.sleep(self.poll_s)

    def _start(self, template: str) -> str:
        """An experiment that cannot take its role fails seconds after it began."""
        fis = self._client("fis")
        experiment = fis.start_experiment(experimentTemplateId=template, tags={names.FLEET: self.fleet})["experiment"]
        for _ in range(5):
            state = fis.get_experiment(id=experiment["id"])["experiment"]["state"]
            if state["status"] in ("failed", "stopped", "cancelled"):
                raise NotYet(state.get("reason", state["status"]))
            if state["status"] in ("running", "completed"):
                break
            time.sleep(self.poll_s)
        return experiment["id"]

    def _template(self, role: str, arn: str) -> str:
        if not self._templates:
            made = self._client("fis").create_experiment_template(
                description=f"interrupts one spot host of the spotfleet fleet {self.fleet}", roleArn=role,
                stopConditions=[{"source": "none"}], tags={names.FLEET: self.fleet},
                targets={"host": {"resourceType": "aws:ec2:spot-instance", "resourceArns": [arn],
                                  "selectionMode": "ALL"}},
                actions={"interrupt": {"actionId": ACTION, "parameters": {"durationBeforeInterruption": NOTICE},
                                       "targets": {"SpotInstances": "host"}}})
            self._templates.append(made["experimentTemplate"]["id"])
        return self._templates[0]

    def _make_role(self, account: str, partition: str) -> str:
        iam, name = self._client("iam"), names.role(self.fleet, "fis", self.region)
        trust = {"Version": "2012-10-17", "Statement": [{
            "Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "fis.amazonaws.com"},
            "Condition": {"StringEquals": {"aws:SourceAccount": account}}}]}
        may = {"Version": "2012-10-17", "Statement": [
            {"Effect": "Allow", "Action": "ec2:SendSpotInstanceInterruptions",
             "Resource": f"arn:{partition}:ec2:{self.region}:{account}:instance/*",
             "Condition": {"StringEquals": {f"aws:ResourceTag/{names.FLEET}": self.fleet}}},
            {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"}]}
        self._made = name
        made = iam.create_role(RoleName=name, Path=names.IAM_PATH, AssumeRolePolicyDocument=json.dumps(trust),
                               Description="lets AWS FIS interrupt hosts of a spotfleet fleet",
                               Tags=[{"Key": names.FLEET, "Value": self.fleet},
                                     {"Key": names.REGION, "Value": self.region}])  # so `down` would find it, too
        iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=json.dumps(may))
        self.tell(f"role {name}, which lets FIS interrupt this fleet's hosts")
        self.role = made["Role"]["Arn"]
        return self.role

    def close(self) -> list[str]:
        """Remove what was made here; what went wrong, a line each."""
        troubles: list[str] = []
        fis, iam = self._client("fis"), self._client("iam")
        for template in self._templates:
            self._gone(troubles, lambda t=template: fis.delete_experiment_template(id=t), f"FIS template {template}")
        if self._made:
            with suppress(ClientError):
                iam.delete_role_policy(RoleName=self._made, PolicyName=self._made)
            self._gone(troubles, lambda: iam.delete_role(RoleName=self._made), f"role {self._made}")
        return troubles

    @staticmethod
    def _gone(troubles: list[str], remove: Callable[[], object], what: str) -> None:
        try:
            remove()
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("NoSuchEntity", "ResourceNotFoundException"):
                troubles.append(f"{what} was not removed: {error}")

    def _account(self) -> tuple[str, str]:
        said = self._client("sts").get_caller_identity()
        return said["Account"], said["Arn"].split(":")[1]

    def _client(self, service: str) -> Any:
        return self.session.client(service, region_name=self.region)


class NotYet(Exception):
    """An experiment that failed before it did anything."""
