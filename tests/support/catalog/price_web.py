"""Azure's Retail Prices API and GCP's Cloud Billing Catalog API on loopback, in the shapes that they document."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "AIza-not-a-real-key"


@dataclass
class Web:
    """What the clouds sell, and what goes wrong. `faults`: for the next requests, one each: a status, "cut" for half an
    answer, "html", or None for none."""

    meters: list[dict[str, Any]] = field(default_factory=list)  # Azure's
    skus: list[dict[str, Any]] = field(default_factory=list)  # GCP's
    page: int = 3  # items on one
    faults: list[int | str | None] = field(default_factory=list)
    next_host: str = ""  # where Azure says its next page is; empty: here
    retry_after: str = "0"  # said with each 429
    asked: list[str] = field(default_factory=list)  # paths with their queries
    url: str = ""

    def sell(self, sku: str, region: str, usd: float, kind: str = "", product: str = "Virtual Machines NDSv4 Series",
             **more: Any) -> None:
        """A meter of Azure; `kind`: "Spot", "Low Priority" or nothing."""
        name = f"{sku.removeprefix('Standard_').replace('_', ' ')} {kind}".strip()
        self.meters.append({
            "currencyCode": "USD", "tierMinimumUnits": 0.0, "retailPrice": usd, "unitPrice": usd,
            "armRegionName": region, "location": region, "effectiveStartDate": "2026-01-01T00:00:00Z",
            "meterId": str(len(self.meters)), "meterName": name, "productName": product, "skuName": name,
            "serviceName": "Virtual Machines", "serviceFamily": "Compute", "unitOfMeasure": "1 Hour",
            "type": "Consumption", "isPrimaryMeterRegion": True, "armSkuName": sku, **more})

    def part(self, text: str, usd: float, *regions: str, spot: bool = False, family: str = "Compute",
             usage: str = "") -> None:
        """A SKU of GCP."""
        units = int(usd)
        self.skus.append({
            "name": f"services/6F81-5844-456A/skus/{len(self.skus)}", "description": text,
            "category": {"serviceDisplayName": "Compute Engine", "resourceFamily": family, "resourceGroup": "CPU",
                         "usageType": usage or ("Preemptible" if spot else "OnDemand")},
            "serviceRegions": list(regions),
            "pricingInfo": [{"summary": "", "pricingExpression": {"usageUnit": "h", "tieredRates": [{
                "startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": str(units),
                                                     "nanos": round((usd - units) * 10**9)}}]}}]})

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, Any]]:
        url = urlsplit(path)
        asked = {k: v[0] for k, v in parse_qs(url.query).items()}
        if url.path.endswith("/skus"):
            if headers.get("X-Goog-Api-Key") != KEY:
                return 403, {"error": {"code": 403, "message": "API key not valid", "status": "PERMISSION_DENIED"}}
            begin = int(asked.get("pageToken") or 0)
            end = begin + self.page
            return 200, {"skus": self.skus[begin:end], "nextPageToken": str(end) if end < len(self.skus) else ""}
        names = [w for w in asked.get("$filter", "").split("'") if w.startswith("Standard_")]
        items = [m for m in self.meters if m["armSkuName"] in names]
        begin = int(asked.get("$skip") or 0)
        end = begin + self.page
        more = f"{self.next_host or self.url}{url.path}?{url.query.partition('&$skip=')[0]}&$skip={end}"
        return 200, {"BillingCurrency": "USD", "CustomerEntityId": "Default", "Items": items[begin:end],
                     "NextPageLink": more if end < len(items) else None, "Count": len(items[begin:end])}


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.asked.append(self.path)
            fault = web.faults.pop(0) if web.faults else None
            status, body = (fault, {}) if isinstance(fault, int) else web.answer(self.path, self.headers)
            text = b"<html>no</html>" if fault == "html" else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if status == 302:
                self.send_header("Location", f"{web.url}/elsewhere")
            if status == 429:
                self.send_header("Retry-After", web.retry_after)
            self.end_headers()
            self.wfile.write(text[:len(text) // 2] if fault == "cut" else text)

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
