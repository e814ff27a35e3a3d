"""An engine process without a model, for tests of the front: speaks the real messages, invents the tokens.

What a request does is in its first prompt id, what a start does in the model path.
"""

import os
import signal
import time
from multiprocessing.connection import Connection

from loraplex.engine.config import Config
from loraplex.engine.messages import (
    Abort,
    AdapterInfo,
    EngineState,
    ErrorInfo,
    Fatal,
    FrontMessage,
    GetState,
    Heartbeat,
    LoadAdapter,
    Progress,
    Ready,
    Reply,
    Shutdown,
    StepOutput,
    Submit,
    TokenOut,
    UnloadAdapter,
    decode_front,
    encode,
)
from loraplex.engine.request import Request

COUNTS, SILENT, DIES, FAILS, CLOSES_PIPE = range(5)


def rank_main(config: Config, rank: int, conn: Connection, followers: list[Connection], init_file: str) -> None:
    if rank > 0:
        return follow(conn)
    start = os.path.basename(config.model.model_path)
    if start == "exits":
        os._exit(3)
    if start == "hangs":
        time.sleep(600)
    if start == "fatal":
        conn.send_bytes(encode(Fatal(text="Traceback …\nmodel.safetensors: tensor lm_head.weight is missing")))
        return None
    conn.send_bytes(encode(Progress(text="loading 1/2")))
    conn.send_bytes(encode(ready(config)))
    return FakeEngine(conn).run()


def follow(conn: Connection) -> None:
    try:
        conn.recv_bytes()
    except EOFError:
        return


def ready(config: Config) -> Ready:
    adapters = [adapter_info(name, path) for name, path in config.lora.adapters]
    return Ready(
        vocab_size=300,
        context_length=128,
        max_total_tokens=1024,
        page_size=16,
        eos_token_ids=[2],
        model_type="fake",
        dtype="float32",
        device="cpu",
        memory_table=[("weights", 3 << 20), ("KV cache", 512)],
        adapters=adapters,
    )


def adapter_info(name: str, path: str) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        path=path,
        digest="d",
        version=1,
        rank_min=4,
        rank_max=8,
        layout="l",
        bytes=7,
        num_tensors=2,
    )


class FakeEngine:
    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.live: set[int] = set()
        self.aborted: list[int] = []

    def run(self) -> None:
        while True:
            self.conn.send_bytes(
                encode(Heartbeat(step=1, num_running=0, num_waiting=0, kv_used_tokens=0, kv_cached_tokens=0))
            )
            if self.conn.poll(0.05):
                message = decode_front(self.conn.recv_bytes())
                if isinstance(message, Shutdown):
                    return
                self.handle(message)

    def handle(self, message: FrontMessage) -> None:
        match message:
            case Submit(request=request):
                self.serve(request)
            case Abort(id=id):
                self.aborted.append(id)
                self.live.discard(id)
            case LoadAdapter(op=op, name="bad"):
                self.reply(Reply(op=op, error=ErrorInfo(status=422, message="tensor x has no place")))
            case LoadAdapter(op=op, name=name, path=path):
                info = adapter_info(name, path)
                self.reply(Reply(op=op, result={key: getattr(info, key) for key in info.__struct_fields__}))
            case UnloadAdapter(op=op):
                self.reply(Reply(op=op, result={}))
            case GetState(op=op):
                self.reply(Reply(op=op, result=self.state()))

    def state(self) -> dict[str, object]:
        state = EngineState(
            total=64,
            free=64 - len(self.live),
            cached=0,
            held=len(self.live),
            adapter_refs={},
            live_requests=len(self.live),
            waiting=0,
            running=len(self.live),
            preemptions=len(self.aborted),
        )
        return {key: getattr(state, key) for key in state.__struct_fields__}

    def reply(self, reply: Reply) -> None:
        self.conn.send_bytes(encode(reply))

    def serve(self, request: Request) -> None:
        behaviour = request.prompt_ids[0]
        if behaviour == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == CLOSES_PIPE:
            self.conn.close()
            time.sleep(600)
        if behaviour == SILENT:
            self.live.add(request.id)
        if behaviour == FAILS:
            error = ErrorInfo(status=400, message="never fits")
            self.step([TokenOut(id=request.id, finish_reason="error", error=error)])
        if behaviour == COUNTS:
            last = request.sampling.max_tokens - 1
            for token in range(last + 1):
                end = "length" if token == last else None
                self.step(
                    [TokenOut(id=request.id, index=i, tokens=[token], finish_reason=end) for i in range(request.n)]
                )

    def step(self, outputs: list[TokenOut]) -> None:
        self.conn.send_bytes(encode(StepOutput(outputs=outputs)))
