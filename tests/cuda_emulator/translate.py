"""Translate PTX, the assembly language that nvcc compiles kernels to, to C++ for a CPU's threads (ptx.h, threads.h).

Every instruction becomes a statement that does what the PTX ISA says of it. One that is not known here is an error.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TYPES = {"pred": "bool", "f32": "float", "f64": "double", "f16": "ptx::Half", "bf16": "ptx::BFloat16"}
TYPES |= {"bf16x2": "ptx::BFloat16Pair"}
TYPES |= {f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)}
TYPES |= {f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)}
WIDER = {f"{sign}int{bits}_t": f"{sign}int{2 * bits}_t" for sign in ("", "u") for bits in (16, 32)}

SPECIAL_REGISTERS = {"%laneid": "emulator::lane()"} | {
    f"%{register}.{axis}": f"emulator::{index}.{axis}"
    for register, index in {
        "tid": "thread_index",
        "ctaid": "block_index",
        "ntid": "block_size",
        "nctaid": "grid_size",
    }.items()
    for axis in "xyz"
}

OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# functions of ptx.h, on the type that the instruction's name ends with
FUNCTIONS = {"div": "quotient", "rem": "remainder", "min": "minimum", "max": "maximum", "abs": "absolute"}
FUNCTIONS |= {"not": "complement", "sqrt": "square_root", "rcp": "reciprocal", "rsqrt": "reciprocal_square_root"}
FUNCTIONS |= {"popc": "count_ones", "clz": "count_leading_zeros", "brev": "reverse_bits", "prmt": "pick_bytes"}
FUNCTIONS |= {"neg": "negative", "fma": "fused_multiply_add", "copysign": "copy_sign", "ex2": "power_of_two"}
# what stands for itself; launches run one after the other, so that what lets the next one start does nothing
WHOLE = {
    "ret": "return;",
    "bar.sync 0": "emulator::wait_block();",
    "cp.async.commit_group": "emulator::commit_copies();",
    "cp.async.wait_all": "emulator::finish_copies();",
    "fence.proxy.async": "emulator::fence_proxy();",
    "fence.proxy.async.shared::cta": "emulator::fence_proxy();",
    # product_registers.py looks for it
    "wgmma.fence.sync.aligned": ";",
    "wgmma.commit_group.sync.aligned": "emulator::commit_products();",
    "griddepcontrol.wait": "emulator::wait_for_launches_before();",
    "griddepcontrol.launch_dependents": ";",
}
ROUNDINGS = ("rn", "rni", "rzi", "rmi", "rpi")

# what a function's body consists of: braces, labels, places in the source, and instructions
TOKEN = re.compile(
    r"\s*(?:(?P<brace>[{}])|\$(?P<label>\w+):|\.loc\s+(?P<file>\d+) (?P<line>\d+)[^\n]*\n"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
ENTRY = re.compile(r"\.entry (?P<name>\w+)\((?P<parameters>[^)]*)\)(?P<limits>[^{]*)\{")
REGISTER = re.compile(r"%\w+")
# of floats, without a rounding; or the end of a stretch
PRODUCT_OR_SUM = re.compile(
    r"(?P<guard>@!?%\w+\s+)?\b(?P<operation>mul|add|sub)\.(?P<kind>f32|f64)\s+"
    r"(?P<to>%\w+), (?P<first>\S+), (?P<second>\S+);|\bbra\b|\$\w+:"
)
# what an instruction sets
SET = re.compile(r"[\w.]\s+(\{[^}]*\}|%\w+),")
PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.\w(\d+) (\w+)(?:\[(\d+)\])?")


class UnknownInstruction(ValueError):
    """PTX that this translator has not learnt."""


def split(text: str) -> list[str]:
    """The parts between commas, vectors and addresses kept whole."""
    parts = re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text)
    return [part.strip() for part in parts]


def vector(text: str) -> list[str]:
    """The registers of {a, b}, or the one that stands alone."""
    return split(text.strip("{}"))


def variable(register: str) -> str:
    return "v_" + register.replace("%", "")


def join(parts: list[str], part: str, whole: str) -> str:
    """One unsigned integer of several, from the lowest bits on, as C++ expressions; part and whole are their types."""
    bits = int(re.search(r"\d+", part)[0])
    return " | ".join(f"({whole})({part}){x} << {i * bits}" for i, x in enumerate(parts))


class Function:
    """The C++ of one kernel.

    Args:
        symbols: the expressions that names of memory stand for.
        files: the names of the sources by their numbers.
    """

    def __init__(self, symbols: dict[str, str], files: dict[str, str]) -> None:
        self.symbols = dict(symbols)
        self.files = files
        self.types: dict[str, str] = {}
        self.place = '""'
        self.lines: list[str] = []
        # instructions of each stretch that threads enter at its start only
        self.stretches: list[int] = []
        self.operations = 0

    def translate(self, body: str) -> None:
        position = 0
        body = body.rstrip()
        self.start_stretch()
        while position < len(body):
            token = TOKEN.match(body, position)
            if token is None:
                raise UnknownInstruction(body[position : position + 200])
            position = token.end()
            if token["brace"]:
                self.lines.append(token["brace"])
            elif token["label"]:
                self.lines.append(f"{token['label']}:;")
                self.start_stretch()
            elif token["line"]:
                self.place = f'"{self.files[token["file"]]}:{token["line"]}"'
            else:
                self.statement(" ".join(token["statement"].split()))

    def start_stretch(self) -> None:
        if not self.lines or not self.lines[-1].startswith("++"):
            # always, where nobody reads it too: g++ would take longer for a branch in every stretch
            self.lines.append(f"++emulator::stretch_counts[{len(self.stretches)}];")
            self.stretches.append(0)

    def statement(self, text: str) -> None:
        if not text or text.startswith(".pragma"):
            return
        if text.startswith((".reg", ".local")):
            self.declare(text)
            return
        guard = re.match(r"@(!?)(%?\w+) ", text)
        code = self.instruction(text[guard.end() :] if guard else text)
        # ptxas leaves moves out, and takes parameters, sizes and negatives as operands
        self.stretches[-1] += re.match(r"mov|cvta|ld\.param|(abs|neg)\.f", text) is None
        self.lines.append(f"if ({guard[1]}{variable(guard[2])}) {{ {code} }}" if guard else code)
        if code.startswith("goto"):
            self.start_stretch()

    def declare(self, text: str) -> None:
        if match := re.fullmatch(r"\.local \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            self.symbols[match[2]] = f"reinterpret_cast<uint64_t>({match[2]})"
            self.lines.append(f"alignas({match[1]}) unsigned char {match[2]}[{match[3]}];")
            return
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        names: list[str] = []
        for name in split(match[2]):
            many = re.fullmatch(r"(%\w+)<(\d+)>", name)
            names += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        self.types |= dict.fromkeys(names, TYPES[match[1]])
        self.lines.append(f"{TYPES[match[1]]} {', '.join(map(variable, names))};")

    def value(self, operand: str, kind: str) -> str:
        """The bits of a register, a number or an address, as a C++ type."""
        if operand in SPECIAL_REGISTERS or operand in self.symbols:
            return f"({kind}){SPECIAL_REGISTERS.get(operand) or self.symbols[operand]}"
        if match := re.fullmatch(r"0[fFdD]((?:[0-9A-Fa-f]{8}){1,2})", operand):
            bits = f"0x{match[1]}ull" if len(match[1]) == 16 else f"0x{match[1]}u"
            return f"__builtin_bit_cast({kind}, {bits})"
        if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", operand):
            return f"({kind})({operand.rstrip('U')}ull)" if kind != "bool" else str(int(operand, 0) != 0).lower()
        if self.types[operand] == kind:
            return variable(operand)
        if "int" in self.types[operand] and "int" in kind:
            return f"({kind}){variable(operand)}"
        return f"__builtin_bit_cast({kind}, {variable(operand)})"

    def assign(self, register: str, expression: str, kind: str) -> str:
        """Set a register to an expression of a C++ type; a narrower number keeps its value."""
        if register == "_":
            return ""
        if self.types[register] == kind:
            return f"{variable(register)} = {expression};"
        if "int" in self.types[register] and "int" in kind:
            return f"{variable(register)} = ({kind})({expression});"
        return f"{variable(register)} = __builtin_bit_cast({self.types[register]}, ({kind})({expression}));"

    def memory(self, operand: str, space: str, access: str, kind: str, count: int) -> str:
        """A pointer to `count` numbers of a C++ type."""
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        address = f"{self.value(base, 'uint64_t')} + {self.value(offset or '0', 'uint64_t')}"
        if space in ("param", "local", "const"):
            return f"reinterpret_cast<{kind}*>({address})"
        where = "shared" if space == "shared" else "memory"
        return f"{where}_at<{kind}, {count}, Access::{access}>({address}, {self.place})"

    def load(self, to: str, address: str, space: str, kind: str) -> str:
        registers = vector(to)
        at = self.memory(address, space, "kRead", kind, len(registers))
        # an address may be in one of the registers that are loaded
        loads = " ".join(f"const {kind} x{i} = at[{i}];" for i in range(len(registers)))
        sets = " ".join(self.assign(register, f"x{i}", kind) for i, register in enumerate(registers))
        return f"{{ const auto* const at = {at}; {loads} {sets} }}"

    def store(self, address: str, x: str, space: str, kind: str) -> str:
        values = vector(x)
        at = self.memory(address, space, "kWrite", kind, len(values))
        stores = " ".join(f"at[{i}] = {self.value(v, kind)};" for i, v in enumerate(values))
        return f"{{ auto* const at = {at}; {stores} }}"

    def set_from(self, call: str, registers: list[str], kind: str) -> str:
        """Set registers to the elements of what a call returns."""
        sets = " ".join(self.assign(r, f"result[{i}]", kind) for i, r in enumerate(registers))
        return f"{{ const auto result = {call}; {sets} }}"

    def values(self, operands: list[str], kind: str) -> str:
        return ", ".join(self.value(operand, kind) for operand in operands)

    def meeting(self) -> str:
        """The number of an operation that lanes of a warp do together."""
        self.operations += 1
        return str(self.operations)

    def instruction(self, text: str) -> str:
        if text in WHOLE:
            return WHOLE[text]
        opcode, _, rest = text.partition(" ")
        name, *modifiers = opcode.split(".")
        operands = split(rest)
        if name == "bra":
            return f"goto {operands[0].lstrip('$')};"
        translate: Callable[[list[str], list[str]], str] | None = getattr(self, f"{name}_instruction", None)
        if translate is not None:
            code = translate(modifiers, operands)
        elif name in OPERATORS:
            code = self.operator(name, modifiers, operands)
        elif name in FUNCTIONS:
            code = self.function(name, modifiers, operands)
        else:
            code = None
        if code is None:
            raise UnknownInstruction(text)
        return code

    def operator(self, name: str, modifiers: list[str], operands: list[str]) -> str | None:
        kind = TYPES[modifiers[-1]]
        if len(modifiers) > 1 and modifiers[:-1] != ["rn"]:
            return None
        first, second = (self.value(operand, kind) for operand in operands[1:])
        return self.assign(operands[0], f"{first} {OPERATORS[name]} {second}", kind)

    def function(self, name: str, modifiers: list[str], operands: list[str]) -> str | None:
        kind = TYPES[modifiers[-1]]
        function = FUNCTIONS[name]
        if name == "fma" and modifiers == ["rm", "f32"]:
            function = "fused_multiply_add_down"
        elif not {*modifiers[:-1]} <= {"rn", "approx", "ftz"}:
            return None
        elif name == "fma" and kind in ("float", "double"):
            function = "__builtin_fmaf" if kind == "float" else "__builtin_fma"
        result = "uint32_t" if name in ("popc", "clz") else kind
        arguments = [self.value(operand, kind) for operand in operands[1:]]
        if "ftz" in modifiers:
            arguments = [f"flushed({argument})" for argument in arguments]
        if "approx" in modifiers and kind == "float":
            # of double, the others are first guesses, of which nvcc's code makes exact results
            doubles = ", ".join(f"double{{{argument}}}" for argument in arguments)
            return self.assign(operands[0], f"approximation({function}({doubles}))", kind)
        return self.assign(operands[0], f"{function}({', '.join(arguments)})", result)

    # The others, by the names of instructions.

    def mov_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        to, source = operands
        parts = vector(source if source.startswith("{") else to)
        if len(parts) == 1:
            return self.assign(to, self.value(source, kind), kind)
        part = f"uint{int(modifiers[-1][1:]) // len(parts)}_t"
        if source.startswith("{"):
            return self.assign(to, join([self.value(x, part) for x in parts], part, kind), kind)
        return self.set_from(f"parts<{part}>({self.value(source, kind)})", parts, part)

    def cvta_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        address = self.value(operands[1], "uint64_t")
        if "shared" in modifiers:
            address = f"{'to' if 'to' in modifiers else 'from'}_shared({address})"
        return self.assign(operands[0], address, "uint64_t")

    def cvt_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        *how, to, source = modifiers
        if modifiers == ["sat", "f32", "f32"]:
            return self.assign(operands[0], f"saturated({self.value(operands[1], 'float')})", "float")
        if not {*how} <= {*ROUNDINGS, "ftz"}:
            return None
        rounding = next((f"Rounding::{name}" for name in ROUNDINGS if name in how), "Rounding::none")
        if to.endswith("x2"):
            # the first is the upper half
            halves = [f"convert<{TYPES[to[:-2]]}, {rounding}>({self.value(x, TYPES[source])})" for x in operands[1:]]
            return self.assign(operands[0], join(halves[::-1], "uint16_t", "uint32_t"), "uint32_t")
        stored = {"f16": "uint16_t", "bf16": "uint16_t"}.get(to, TYPES[to])
        x = self.value(operands[1], TYPES[source])
        is_cast = {to, source}.isdisjoint(("f16", "bf16")) and rounding in ("Rounding::none", "Rounding::rn")
        if is_cast and (source[0] != "f" or to[0] == "f"):
            return self.assign(operands[0], f"({TYPES[to]}){x}", stored)
        return self.assign(operands[0], f"convert<{TYPES[to]}, {rounding}>({x})", stored)

    def setp_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        if len(modifiers) != 2 or len(operands) != 3:
            return None
        comparison, kind = modifiers[0], TYPES[modifiers[1]]
        first, second = self.value(operands[1], kind), self.value(operands[2], kind)
        if comparison in COMPARISONS:
            result = f"{first} {COMPARISONS[comparison]} {second}"
            if comparison == "ne" and modifiers[1].startswith("f"):
                # C++'s is true of what has no order
                result = f"({result}) && !unordered({first}, {second})"
        else:
            result = f"unordered({first}, {second}) || {first} {COMPARISONS[comparison[:-1]]} {second}"
        return self.assign(operands[0], result, "bool")

    def selp_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        first, second = self.value(operands[1], kind), self.value(operands[2], kind)
        return self.assign(operands[0], f"{variable(operands[3])} ? {first} : {second}", kind)

    def mul_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        kind = TYPES[modifiers[-1]]
        if modifiers[0] == "hi" and len(operands) == 3:
            first, second = (f"({WIDER[kind]}){self.value(operand, kind)}" for operand in operands[1:])
            return self.assign(operands[0], f"({kind})({first} * {second} >> 8 * sizeof({kind}))", kind)
        if not {*modifiers[:-1]} <= {"lo", "wide", "rn"}:
            return None
        result = WIDER[kind] if "wide" in modifiers else kind
        first, second = (f"({result}){self.value(operand, kind)}" for operand in operands[1:3])
        sum_with = f" + {self.value(operands[3], result)}" if len(operands) > 3 else ""
        return self.assign(operands[0], f"{first} * {second}{sum_with}", result)

    mad_instruction = mul_instruction

    def shift(self, function: str, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        x, by = self.value(operands[1], kind), operands[2]
        if by.isdecimal() and int(by) < int(modifiers[-1][1:]):
            return self.assign(operands[0], f"{x} {'<<' if function == 'shift_left' else '>>'} {by}", kind)
        return self.assign(operands[0], f"{function}<{kind}>({x}, {self.value(by, 'uint32_t')})", kind)

    def shl_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        return self.shift("shift_left", modifiers, operands)

    def shr_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        return self.shift("shift_right", modifiers, operands)

    def bfind_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        shift_amount = str("shiftamt" in modifiers).lower()
        return self.assign(operands[0], f"find_bit<{shift_amount}>({self.value(operands[1], kind)})", "uint32_t")

    def bfi_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        kind = TYPES[modifiers[-1]]
        arguments = f"{self.values(operands[1:3], kind)}, {self.values(operands[3:], 'uint32_t')}"
        return self.assign(operands[0], f"insert_bits<{kind}>({arguments})", kind)

    def ld_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        return self.load(*operands, self.space_of(modifiers), TYPES[modifiers[-1]])

    def st_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        return self.store(*operands, self.space_of(modifiers), TYPES[modifiers[-1]])

    @staticmethod
    def space_of(modifiers: list[str]) -> str:
        return next((name for name in modifiers if name in ("shared", "param", "local", "const")), "global")

    # of integers: floats would be added in an order of chance

    def red_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        kind = TYPES[modifiers[-1]]
        if "add" not in modifiers or "int" not in kind:
            return None
        at = self.memory(operands[0], self.space_of(modifiers), "kAdd", kind, 1)
        return f"*{at} += {self.value(operands[1], kind)};"

    def atom_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        kind = TYPES[modifiers[-1]]
        if "add" not in modifiers or self.space_of(modifiers) != "global" or "int" not in kind:
            return None
        at = self.memory(operands[1], "global", "kAdd", kind, 1)
        add = f"const {kind} before = *at; *at += {self.value(operands[2], kind)};"
        return f"{{ auto* const at = {at}; {add} {self.assign(operands[0], 'before', kind)} }}"

    def bar_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        if modifiers == ["red", "or", "pred"] and operands[1] == "0":
            return self.assign(operands[0], f"emulator::any_of_block({self.value(operands[2], 'bool')})", "bool")
        if modifiers == ["sync"] and len(operands) == 2:
            return f"emulator::wait_at({self.values(operands, 'uint32_t')}, {self.place});"
        lanes = self.value(operands[0], "uint32_t")
        return f"emulator::wait_warp({lanes});" if modifiers == ["warp", "sync"] else None

    def cp_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        if modifiers == ["async", "wait_group"]:
            return f"emulator::finish_copies({operands[0]});"
        size = {"cg": "16", "ca": "4"}.get(modifiers[1])
        if modifiers != ["async", modifiers[1], "shared", "global"] or operands[2] != size:
            return None
        to, source = (operand.strip("[]") for operand in operands[:2])
        bytes_read = self.value(operands[3] if len(operands) > 3 else size, "uint32_t")
        arguments = f"{self.value(to, 'uint32_t')}, {self.value(source, 'uint64_t')}, {bytes_read}"
        return f"copy_ahead<{size}>({arguments}, {self.place});"

    def shfl_instruction(self, modifiers: list[str], operands: list[str]) -> str:
        to, _, valid = operands[0].partition("|")
        arguments = f"{self.values(operands[1:], 'uint32_t')}, {self.meeting()}"
        sets = self.assign(to, "result.value", "uint32_t")
        if valid:
            sets += self.assign(valid, "result.valid", "bool")
        return f"{{ const auto result = emulator::shuffle(emulator::Shuffle::{modifiers[1]}, {arguments}); {sets} }}"

    def vote_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        lanes = self.value(operands[2], "uint32_t")
        call = f"emulator::ballot({self.value(operands[1], 'bool')}, {lanes}, {self.meeting()})"
        return self.assign(operands[0], call, "uint32_t") if modifiers == ["sync", "ballot", "b32"] else None

    def ldmatrix_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        if [name for name in modifiers if name != "trans"] != ["sync", "aligned", "m8n8", "x4", "shared", "b16"]:
            return None
        row = self.memory(operands[1], "shared", "kRead", "uint16_t", 8)
        transposed = str("trans" in modifiers).lower()
        call = f"emulator::load_matrices({transposed}, {row}, {self.meeting()})"
        return self.set_from(call, vector(operands[0]), "uint32_t")

    def mma_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        *shape, result, left, right, added = modifiers
        if shape != ["sync", "aligned", "m16n8k16", "row", "col"] or (result, added, left) != ("f32", "f32", right):
            return None
        a, b, c = (
            f"{{{self.values(vector(operand), kind)}}}"
            for operand, kind in zip(operands[1:], ("uint32_t", "uint32_t", "float"), strict=True)
        )
        call = f"emulator::multiply_in_warp(emulator::Format::{left}, {a}, {b}, {c}, {self.meeting()})"
        return self.set_from(call, vector(operands[0]), "float")

    def wgmma_instruction(self, modifiers: list[str], operands: list[str]) -> str | None:
        if modifiers == ["wait_group", "sync", "aligned"]:
            return f"emulator::finish_products({operands[0]});"
        shape = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ".".join(modifiers))
        if shape is None:
            return None
        columns, d, a, (b, adds, *numbers) = int(shape[1]), vector(operands[0]), vector(operands[1]), operands[2:]
        in_registers = len(a) == 4
        # of a in registers, no number says whether it is transposed
        if in_registers:
            numbers.insert(2, "0")
        if (len(d), len(numbers)) != (columns // 2, 4) or columns not in range(8, 257, 8) or numbers[:2] != ["1", "1"]:
            return None
        flags = f".a_in_registers = {str(in_registers).lower()}, .transposed_a = {numbers[2]} != 0"
        flags += f", .transposed_b = {numbers[3]} != 0, .adds = {self.value(adds, 'bool')}"
        descriptors = f".a = {0 if in_registers else self.value(a[0], 'uint64_t')}, .b = {self.value(b, 'uint64_t')}"
        product = f"{{.columns = {columns}, {flags}, {descriptors}, .place = {self.place}}}"
        registers = f"{{{self.values(a, 'uint32_t')}}}" if in_registers else "{}"
        arrays = f"const uint32_t a[4] = {registers}; float d[] = {{{self.values(d, 'float')}}};"
        sets = " ".join(self.assign(register, f"d[{i}]", "float") for i, register in enumerate(d))
        return f"{{ {arrays} emulator::multiply_in_warpgroup({product}, a, d, {self.meeting()}); {sets} }}"


def contract(body: str) -> str:
    """Do what ptxas does: a product that only one sum takes is not rounded, unless the instruction says how.

    Of those in one stretch of instructions, before anything changes their factors.
    """
    uses = Counter(REGISTER.findall(body))
    products: dict[str, re.Match[str]] = {}
    edits: list[tuple[int, int, str]] = []
    for match in PRODUCT_OR_SUM.finditer(body):
        if match["to"] is None:
            # a branch or a label
            products.clear()
        if match["to"] is None or match["guard"]:
            continue
        operands = (match["first"], match["second"])
        if match["operation"] == "mul":
            if uses[match["to"]] == 2:
                products[match["to"]] = match
            continue
        register = next((x for x in operands if x in products), None)
        if register is None:
            continue
        product, added = products.pop(register), operands[operands[0] == register]
        kind, factors = match["kind"], [product["first"], product["second"]]
        set_between = SET.findall(body, product.end(), match.start())
        if product["kind"] != kind or {*factors} & {*REGISTER.findall(" ".join(set_between))}:
            continue
        negated = ""
        if match["operation"] == "sub":
            # the product's register is free
            negative = factors[0] if operands[1] == register else added
            negated = f"neg.{kind} {register}, {negative}; "
            factors[0], added = (register, added) if operands[1] == register else (factors[0], register)
        edits.append((*product.span(), ""))
        edits.append((*match.span(), f"{negated}fma.rn.{kind} {match['to']}, {', '.join(factors)}, {added};"))
    parts, end = [], 0
    for start, stop, text in sorted(edits):
        parts += [body[end:start], text]
        end = stop
    return "".join([*parts, body[end:]])


def lay_out(parameters: str) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Where a kernel's parameters lie: offsets by name, and the offset and size of each in bytes."""
    offsets, sizes, end = {}, [], 0
    for text in split(parameters):
        align, bits, name, count = PARAMETER.fullmatch(text).groups()
        size = int(bits) // 8 * int(count or 1)
        unit = int(align or size)
        offset = (end + unit - 1) // unit * unit
        offsets[name] = offset
        sizes.append((offset, size))
        end = offset + size
    return offsets, sizes


class Kernel(NamedTuple):
    """The parts of a kernel's PTX."""

    name: str
    parameters: str
    limits: str
    body: str


def find_kernels(ptx: str) -> Iterator[Kernel]:
    """The kernels of a module, without comments."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    for entry in ENTRY.finditer(ptx):
        depth, end = 1, entry.end()
        while depth > 0:
            brace = re.compile("[{}]").search(ptx, end)
            depth += 1 if brace[0] == "{" else -1
            end = brace.end()
        yield Kernel(*entry.group("name", "parameters", "limits"), ptx[entry.end() : end - 1])


def source_files(ptx: str) -> dict[str, str]:
    """The names of a module's sources, by their numbers."""
    return {number: Path(path).name for number, path in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', ptx, re.M)}


def translate(ptx: str) -> str:
    """Translate a module.

    Args:
        ptx: what nvcc -ptx writes, with -lineinfo.

    Returns:
        a C++ source that registers the module's kernels by their names.

    Raises:
        UnknownInstruction: the module has an instruction, or a form of one, that is not known here.
    """
    files = source_files(ptx)
    # a block's shared memory begins at address 0
    shared = dict.fromkeys(re.findall(r"^\.extern \.shared [^;]*?(\w+)\[\];", ptx, re.M), "0")
    lines = ['#include "ptx.h"', "using namespace ptx;", "namespace {"]
    for number, kernel in enumerate(find_kernels(ptx)):
        offsets, sizes = lay_out(kernel.parameters)
        symbols = {name: f"reinterpret_cast<uint64_t>(parameters + {offset})" for name, offset in offsets.items()}
        function = Function(shared | symbols, files)
        function.translate(contract(kernel.body))
        threads = re.search(r"\.maxntid (\d+)", kernel.limits)
        layout = ", ".join(f"{{{offset}, {size}}}" for offset, size in sizes)
        stretches = ", ".join(map(str, function.stretches))
        lines += [f"void kernel_{number}(const unsigned char* parameters) {{", *function.lines, "}"]
        launch = f'"{kernel.name}", kernel_{number}, {threads[1] if threads else 1024}'
        lines.append(f"const bool added_{number} = emulator::add_kernel({{{launch}, {{{layout}}}, {{{stretches}}}}});")
    return "\n".join([*lines, "}  // namespace", ""])
