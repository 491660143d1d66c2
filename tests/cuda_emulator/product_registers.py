"""Whether a kernel leaves alone the registers of warpgroups' products (wgmma) while these may read or write them.

From a product on until it has been waited for, PTX promises nothing of what reads or writes its sums, or the matrix
that it has in registers; nor of a product without a fence after what had its registers before. The emulator multiplies
at once, and so computes what the source means.
"""

import re
from typing import NamedTuple

if __package__:
    from .translate import REGISTER, TOKEN, find_kernels, source_files, split, vector
else:
    from translate import REGISTER, TOKEN, find_kernels, source_files, split, vector

# that a wait can leave out
MOST_GROUPS = 7


class RegisterInUse(ValueError):
    """An instruction takes or sets a register that a product may still read or write, or the other way round."""


class State(NamedTuple):
    """What is known of a kernel's registers at a place.

    Args:
        groups: those of products that have not been waited for, and copies of them: of all groups that no wait leaves
            out, of MOST_GROUPS newer ones, and of the one that is not committed.
        touched: those of any product that other instructions have had since the last fence.
    """

    groups: tuple[frozenset[str], ...]
    touched: frozenset[str]

    def or_else(self, other: "State") -> "State":
        """What may be so where two ways meet."""
        groups = tuple(one | another for one, another in zip(self.groups, other.groups, strict=True))
        return State(groups, self.touched | other.touched)


def check_products(ptx: str) -> None:
    """Follow every path through a module's kernels.

    Args:
        ptx: what nvcc -ptx writes, with -lineinfo.

    Raises:
        RegisterInUse: an instruction, but for a move or another product, has a register of a product that has not been
            waited for, or what a move has made of one; or a product has one without a fence after other instructions.
    """
    files = source_files(ptx)
    for kernel in find_kernels(ptx):
        follow(*instructions(kernel.body, files))


def instructions(body: str, files: dict[str, str]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The instructions with their places in the source, and where labels are among them."""
    found: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    place = ""
    for token in TOKEN.finditer(body):
        if token["label"]:
            labels[token["label"]] = len(found)
        elif token["line"]:
            place = f"{files[token['file']]}:{token['line']}"
        elif token["statement"] and not token["statement"].strip().startswith("."):
            found.append((" ".join(token["statement"].split()), place))
    return found, labels


def registers_of_product(rest: str) -> frozenset[str]:
    """Those of its sums, and of the matrix that is in registers."""
    sums, a, *_ = split(rest)
    return frozenset(vector(sums) + (vector(a) if a.startswith("{") else []))


def follow(code: list[tuple[str, str]], labels: dict[str, int]) -> None:
    """Go all ways through the code, until no place is reached with more than before."""
    products = [text.partition(" ")[2] for text, _ in code if text.startswith("wgmma.mma_async")]
    of_products = frozenset().union(*map(registers_of_product, products))
    ways = [(0, State((frozenset(),) * (MOST_GROUPS + 2), of_products))]
    known: dict[int, State] = {}
    targets = set(labels.values())
    while ways and products:
        index, state = ways.pop()
        while index < len(code):
            if index in targets:
                state = state.or_else(known.get(index, state))
                if state == known.get(index):
                    break
                known[index] = state
            text, place = code[index]
            guard, instruction = re.fullmatch(r"(@!?%?\w+ )?(.*)", text).groups()
            opcode, _, rest = instruction.partition(" ")
            index += 1
            if opcode.startswith("bra"):
                ways.append((labels[rest.lstrip("$")], state))
            if opcode.startswith(("bra", "ret")) and guard is None:
                break
            try:
                state = state_after(state, opcode, rest, of_products)
            except RegisterInUse as error:
                raise RegisterInUse(f"{place}: {text}: {error}") from None


def state_after(state: State, opcode: str, rest: str, of_products: frozenset[str]) -> State:
    """What is known after an instruction."""
    groups, touched = state
    if opcode.startswith("wgmma.fence"):
        return State(groups, frozenset())
    if opcode.startswith("wgmma.mma_async"):
        registers = registers_of_product(rest)
        refuse(registers & touched, "of other instructions since the last fence")
        return State((*groups[:-1], groups[-1] | registers), touched)
    if opcode.startswith("wgmma.commit_group"):
        return State((groups[0] | groups[1], *groups[2:], frozenset()), touched)
    if opcode.startswith("wgmma.wait_group"):
        left = int(rest) + 1
        return State((frozenset(),) * (len(groups) - left) + groups[-left:], touched)
    registers = frozenset(REGISTER.findall(rest))
    if opcode.startswith("mov."):
        # a copy of a sum is as little there as the sum
        to, source = ({*REGISTER.findall(part)} for part in split(rest))
        groups = tuple(group | to if group & source else group - to for group in groups)
    else:
        refuse(registers & frozenset().union(*groups), "of a product that has not been waited for")
    return State(groups, touched | registers & of_products)


def refuse(registers: frozenset[str], what: str) -> None:
    if registers:
        raise RegisterInUse(f"{', '.join(sorted(registers))} {what}")
