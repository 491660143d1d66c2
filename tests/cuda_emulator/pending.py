"""Whether a kernel leaves alone the registers of warpgroups' products until it has waited for these (wgmma).

PTX promises nothing of what reads or writes sums, or the matrix that is in registers, before. The emulator multiplies
at once, and so computes what the source means.
"""

import re

if __package__:
    from .translate import REGISTER, TOKEN, find_kernels, source_files, split, vector
else:
    from translate import REGISTER, TOKEN, find_kernels, source_files, split, vector

# that a wait can leave out, and the one that is not committed
MOST_GROUPS = 8


class RegisterInUse(ValueError):
    """An instruction takes or sets a register that a product may still read or write."""


def check_products(ptx: str) -> None:
    """Follow every path through a module's kernels.

    Args:
        ptx: what nvcc -ptx writes, with -lineinfo.

    Raises:
        RegisterInUse: an instruction, but for a move or another product, has a register of a product that has not been
            waited for, or what a move has made of one.
    """
    files = source_files(ptx)
    for kernel in find_kernels(ptx):
        if "wgmma.mma_async" in kernel.body:
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


def follow(code: list[tuple[str, str]], labels: dict[str, int]) -> None:
    """Go all ways through the code, each with all that is pending where it is entered."""
    ways: list[tuple[int, tuple[frozenset[str], ...]]] = [(0, (frozenset(),))]
    entered = set()
    targets = set(labels.values())
    while ways:
        index, groups = ways.pop()
        while index < len(code):
            if index in targets:
                if (index, groups) in entered:
                    break
                entered.add((index, groups))
            text, place = code[index]
            guard, instruction = re.fullmatch(r"(@!?%?\w+ )?(.*)", text).groups()
            opcode, _, rest = instruction.partition(" ")
            index += 1
            if opcode.startswith("bra"):
                ways.append((labels[rest.lstrip("$")], groups))
            if opcode.startswith(("bra", "ret")) and guard is None:
                break
            try:
                groups = pending_after(groups, opcode, rest)
            except RegisterInUse as error:
                raise RegisterInUse(f"{place}: {text}: {error}") from None


def pending_after(groups: tuple[frozenset[str], ...], opcode: str, rest: str) -> tuple[frozenset[str], ...]:
    """The registers of products, by groups, after an instruction; the last group has not been committed."""
    *committed, newest = groups
    if opcode.startswith("wgmma.mma_async"):
        sums, a, *_ = split(rest)
        return (*committed, newest | {*vector(sums)} | ({*vector(a)} if a.startswith("{") else set()))
    if opcode.startswith("wgmma.commit_group"):
        # those that no wait leaves out are one, so that there is an end of ways through a loop
        groups = (*groups, frozenset())
        return (frozenset().union(*groups[:-MOST_GROUPS]), *groups[-MOST_GROUPS:])
    if opcode.startswith("wgmma.wait_group"):
        return (*committed[max(len(committed) - int(rest), 0) :], newest)
    if opcode.startswith("mov."):
        # a copy of a sum is as little there as the sum
        to, source = ({*REGISTER.findall(part)} for part in split(rest))
        return tuple(group | to if group & source else group - to for group in groups)
    used = {*REGISTER.findall(rest)} & frozenset().union(*groups)
    if used:
        raise RegisterInUse(f"{', '.join(sorted(used))} of a product that has not been waited for")
    return groups
