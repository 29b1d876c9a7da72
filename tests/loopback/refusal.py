"""What the server answers when it says no."""

from typing import Any


class Refusal(Exception):  # noqa: N818 - no error of the server
    """An HTTP status with a message, an error code (`X-Error-Code`) and a JSON body, as the real Hub gives them."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": message} if body is None else body
        self.headers = {"X-Error-Message": message.replace("\n", " "), **(headers or {})}
        if code:
            self.headers["X-Error-Code"] = code
