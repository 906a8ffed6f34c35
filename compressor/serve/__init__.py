"""An HTTP server that speaks OpenAI's protocol, in front of one batch."""

from compressor.serve.app import make_app
from compressor.serve.run import serve
from compressor.serve.worker import Worker

__all__ = ["Worker", "make_app", "serve"]
