"""A container's health: exits 0 when a port of its own answers, 1 with the reason when not. `healthcheck.py 9101/metrics`

Refuses to ask another machine, and to wait: five seconds.
"""

import sys
import urllib.error
import urllib.request


def main() -> None:
    url = f"http://127.0.0.1:{sys.argv[1]}"
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except (urllib.error.URLError, OSError) as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
