"""The ClientApp of every site: thin, since Flower starts a process for each message.

With a worker at hand (node config `worker`) the message goes to it as it is, and this process never imports torch.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfa.flower.parcel import Parcel
from fedfa.flower.settings import SiteSettings

app = ClientApp()


@app.train()
@app.evaluate()
@app.query("join")
@app.query("share")
def answer(message: Message, context: Context) -> Message:
    """Answer any request of the server."""
    settings = SiteSettings.of(context.node_config, context.run_config)
    parcel = Parcel.of(message.content)
    if settings.worker:
        from fedfa.flower.worker import ask

        reply = ask(settings.worker, parcel)
    else:
        from fedfa.flower.site import Site

        reply = Site(settings).answer(parcel)
    return Message(reply.records(), reply_to=message)
