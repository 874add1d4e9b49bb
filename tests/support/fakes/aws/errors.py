"""Error codes with the HTTP status and the shape that each protocol gives them."""

from __future__ import annotations

import json
from xml.sax.saxutils import escape

from tests.support.fakes.kit.requests import Lost as Lost

STATUS = {  # HTTP status of EC2's errors; all others are 400
    "InsufficientInstanceCapacity": 500,
    "UnfulfillableCapacity": 500,
    "InsufficientCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "Unavailable": 503,
    "ServiceUnavailable": 503,
    "RequestLimitExceeded": 503,
    "UnauthorizedOperation": 403,
    "AccessDenied": 403,
    "AuthFailure": 401,
    "InvalidClientTokenId": 403,
    "InvalidAccessKeyId": 403,
    "ExpiredToken": 403,
    "SignatureDoesNotMatch": 403,
    "DryRunOperation": 412,
    "NoSuchEntity": 404,
    "EntityAlreadyExists": 409,
    "DeleteConflict": 409,
    "OptInRequired": 401,
    "PendingVerification": 400,
}


class AwsError(Exception):
    """The cloud refuses."""

    def __init__(self, code: str, message: str = "", status: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message or code
        self.status = status or STATUS.get(code, 400)


def answer(error: AwsError, protocol: str, request_id: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body as `protocol` ("ec2", "query", "json", "rest-xml", "rest-json") says it."""
    code, message = error.code, error.message
    if protocol == "ec2":
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error><Code>{escape(code)}</Code>'
            f"<Message>{escape(message)}</Message></Error></Errors><RequestID>{request_id}</RequestID></Response>"
        )
        return error.status, {"Content-Type": "text/xml"}, body.encode()
    if protocol == "query":
        kind = "Receiver" if error.status >= 500 else "Sender"
        body = (
            f"<ErrorResponse><Error><Type>{kind}</Type><Code>{escape(code)}</Code>"
            f"<Message>{escape(message)}</Message></Error><RequestId>{request_id}</RequestId></ErrorResponse>"
        )
        return error.status, {"Content-Type": "text/xml"}, body.encode()
    if protocol == "rest-xml":
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(code)}</Code>'
            f"<Message>{escape(message)}</Message><RequestId>{request_id}</RequestId></Error>"
        )
        return error.status, {"Content-Type": "application/xml"}, body.encode()
    headers = {"Content-Type": "application/x-amz-json-1.1", "x-amzn-ErrorType": code}
    return error.status, headers, json.dumps({"__type": code, "message": message}).encode()
