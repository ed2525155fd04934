"""Examples of config files for the reference: kind -> name of a file -> text. The examples of a kind use every key."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "project": {
        "project/hil.toml": """\
[defaults]
board = "sim-f16"                # or: runtime_hw_type = "sim-f16"
flow = "iree-O3"
out = "results/runs"
web_url = "https://hil.lab"
notify_github = "lab/models"
runtime = "iree"
arithmetic = "float16"
device = "vulkan"
function = "main"
dims = ["N=1", "T=1..512"]
seed = 3
input_range = "-1:1"
generate = "prompts.generate.toml"
references = ["onnxruntime", "onnx-reference"]
rtol = 1e-3
atol = 1e-4
accept = ["sqnr>=60"]
allow_blind = ["mask_*"]
allow_flush = ["probabilities"]
allow_unstable = ["noise"]
require_independent = true
no_fallback = true
iterations = 20
warmup = 2
repeat = 3
fresh_load = true
recompile = 2
recompute = false
instructions = false
energy = false
timeout = 120
labels = ["nightly"]
compile_flags = ["--iree-opt-level=O2"]
debug_ir = "ir"
debug_ir_passes = false

[models."digits_*.onnx"]         # the keys of an option apply here also
iterations = 5
dims = ["N=2"]

[models."digits_cnn.onnx".outputs."logits"]
accept = ["top1>=0.99", "kl<=1e-4"]

[history]
path = "history"
quota = "500 MiB"
auto = true
baseline = "main"
""",
        "bf16/hil.toml": """\
[defaults]
runtime_hw_type = "sim-bf16"
""",
    },
    "farm": {
        "farm/farm.toml": """\
[terms]
lease_s = 12
holder_s = 40
owner_s = 12
beat_s = 3
health_every_s = 3600
quarantine_s = 60
quarantine_most_s = 1800
aging_s = 300
share_half_life_s = 7200
keep_days = 90
reserve_lead_s = 600
gather_s = 30

[limits]
boards = 2
queued = 100
lease_hours = 8

[limits.users.ci]
boards = 8
queued = 1000
lease_hours = 1.5

[history]
auto = true
path = "history"
quota = "10 GiB"
baseline = "main"

[webhooks.ci]
url = "https://ci.example.com/hil"
secret_env = "CI_SECRET"
events = ["job_ended"]
failed_only = true

[webhooks.chat]
url_env = "CHAT_URL"
secret = "shared secret"
format = "slack"

[oidc]
issuer = "https://login.example.com/realms/lab"
audience = ["hil"]
algorithms = ["RS256"]
user_claim = "preferred_username"
groups_claim = "groups"
project_claim = "team"
role = "submitter"
leeway_s = 10
stream_hours = 12

[oidc.roles]
viewer = ["guests"]
submitter = ["vision", "speech"]
host = ["lab-hosts"]
admin = ["lab-admins"]

[oidc.rights]
power = ["vision"]
commands = ["vision"]
provision = ["lab"]
""",
    },
    "board": {
        "boards/pi5-1.toml": """\
# An Arm board over SSH.
[board]
name = "pi5-1"
hw_type = "pi5"
description = "Raspberry Pi 5 on shelf 2"
runtime = "iree"
arithmetic = "float32"

[arithmetic]
tflite = "int8"

[devices]
iree = "local-task"
"*" = ""

[compile_flags]
iree = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-triple=aarch64-linux-gnu", "--iree-llvmcpu-target-cpu=cortex-a76"]

[labels]
shelf = 2
fan = true

[stack]
firmware = ["vcgencmd", "version"]
driver = { command = ["./driver.sh", "pi5-1"] }
carrier = "rev B"

[connection]
address = "hil@pi5-1.lab:22"
identity = "keys/pi5"
known_hosts = "known_hosts"
accept_new_host_key = false
host_key = "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
folder = "/srv/hil"
fence = 7
lease = "ana, farm.lab"
host_meter = "command"
image = '{"file": "npu-5.img", "sha256": "9a3f", "time_s": 1796083200.0}'

[power]
reset = ["usbrelay", "BOARD_1=1"]
off = { url = "http://pdu.lab/outlet/3/off", method = "POST", headers = { X-Key = "1" }, body = "" }
on = { url = "http://pdu.lab/outlet/3/on" }
cycle = "outlet --cycle 3"
delay = 5
boot_s = 60
timeout_s = 30

[recover]
steps = [{ board = ["systemctl", "restart", "npu"] }, "reset", { command = ["./unplug", "3"] }, "cycle"]
timeout_s = 20

[console]
serial = "/dev/ttyUSB0"
baud = 115200
boot = "login:"
boot_s = 60

[[console.patterns]]
name = "npu fault"
pattern = "npu[0-9]: fault"
meaning = "the accelerator stopped"

[provision]
command = ["./flash", "{image}"]
timeout_s = 600
boot_s = 120

[access]
users = ["ana"]
groups = ["vision"]

[measure]
before = [{ board = ["cpupower", "frequency-set", "-g", "performance"] }, "fan-control --speed 100"]
after = [{ board = ["cpupower", "frequency-set", "-g", "ondemand"] }]
timeout_s = 20

[peak]
f32_gflops = 76.8
f16_gflops = 153.6
int8_gops = 307.2
memory_gb_s = 12.8

[meter]
kind = "command"
command = ["joulescope-stream", "--csv"]
columns = ["time", "volts", "amps", "gpio"]
clock = "epoch"
windows = "gpio"
idle_s = 2
start_s = 30
""",
        "boards/agent.toml": """\
# An agent that listens on a port, with TLS.
[console]
command = ["picocom", "--quiet", "/dev/ttyUSB1"]

[connection]
address = "board.lab:7061"
token_file = "board.token"
ca = "ca.pem"
cert = "client.pem"
key = "client.key"
""",
        "boards/npu.toml": """\
# A board without an agent, with the power switch of labgrid.
[board]
hw_type = "npu"

[runtime]
kind = "command"
program = "/opt/npu/bin/npu-run"
flags = ["{module}", "--entry={function}", "{inputs}", "{outputs}", "{parameters}"]
input = "--in={type}:{file}"
output = "--out={file}"
parameter = "--weights={file}"
tensors = "bin"
environment = { NPU_LOG = "error" }
version = "2.4"

[power]
cmd_reset = "labgrid-client -p npu-1 power reset"
cmd_off = "labgrid-client -p npu-1 power off"
cmd_on = "labgrid-client -p npu-1 power on"
cmd_cycle = "labgrid-client -p npu-1 power cycle"

[console]
labgrid = "console"

[labgrid]
place = "npu-1"
coordinator = "labgrid.lab:20408"
service = "ssh"
client = "labgrid-client"
""",
        "boards/m4.toml": """\
# A microcontroller on a serial line.
[connection]
address = "serial:/dev/ttyACM0"

[mcu]
chip = "stm32f407"
core = "cortex-m4"
flash_memory = "0x08000000:1M"
ram = "0x20000000:128K"
tick_hz = 168000000
uart = "usart2.c"
uart_irq = 38
stack = "16K"
baud = 921600
defines = { USART2 = "0x40004400" }
flash = ["openocd", "-f", "board/stm32f4discovery.cfg", "-c", "program {elf} verify reset exit"]
reset = "openocd -f board/stm32f4discovery.cfg -c 'init; reset; exit'"
boot_s = 5
watchdog_s = 30
""",
        "boards/program.toml": """\
# A program of the host that hil installs on the board.
[console]
address = "telnet://lab:4001"

[runtime]
kind = "command"
file = "bin/iree-run-module"
""",
        "boards/desk.toml": """\
# A board whose console a host of the farm reads.
[connection]
address = "root@rpi5-3.lab"

[console]
farm = "rpi5-3"
""",
        "boards/metered.toml": """\
# A simulated board with a simulated meter.
[simulator]

[meter]
kind = "simulated"
rate_hz = 200

[meter.options]
idle_w = 2.0
active_w = 5.0
noise_w = 0.1
drift_w = 0.01
lost = 0.001
seed = 1
""",
        "boards/sensor.toml": """\
# A board with a power sensor that this machine reads.
[connection]
address = "hil@pi5-2.lab"

[meter]
kind = "hwmon"
path = "/sys/class/hwmon/hwmon3"
where = "host"
channel = 2
""",
        "boards/emulated.toml": """\
# An emulated board whose clock counts instructions.
[board]
icount_shift = 3
""",
        "boards/sim-slow.toml": """\
# A simulated board.
[board]
hw_type = "sim-slow"
arithmetic = "bfloat16"

[simulator]
memory_limit = 67108864
arithmetic = "bfloat16"
faults = ["slow:rate=2e6"]
""",
    },
}
