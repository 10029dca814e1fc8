"""Hadamard matrices by construction: doubling (Sylvester) and quadratic residues of finite fields (Paley, 1933)."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def hadamard_signs(order: int) -> Tensor:
    """[order, order] int8 of +1 and -1 with H H^T = order * I.

    Built from 1, 2, q + 1 (q a prime power, 3 more than a multiple of 4), 2 (q + 1) (q one more than one), and
    products of those. ValueError for an order for which there is none, or none of these (92 is the first).
    """
    found = _construct(order)
    if found is None:
        hint = (
            "it is not 1, 2 or a positive multiple of 4"
            if order < 4 or order % 4
            else "neither Paley's rules nor products reach it"
        )
        raise ValueError(f"no Hadamard matrix of order {order} can be built: {hint}")
    return found


def has_hadamard(order: int) -> bool:
    """Whether `hadamard_signs` has a matrix of this order."""
    return _construct(order) is not None


@lru_cache(maxsize=256)
def _construct(order: int) -> Tensor | None:
    if order in (1, 2):
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)[:order, :order]
    if order < 4 or order % 4:
        return None
    paley = _paley(order)
    if paley is not None and order & (order - 1):  # powers of two by doubling, as a fast transform has them
        return paley
    for left in (2, *range(4, order // 2 + 1, 4)):
        if order % left == 0:
            right = _construct(order // left)
            mine = None if right is None else _construct(left)
            if right is not None and mine is not None:
                return torch.kron(mine, right)
    return paley


def _paley(order: int) -> Tensor | None:
    field = order - 1
    if field % 4 == 3 and (found := _prime_power(field)) is not None:
        signs = torch.ones(order, order, dtype=torch.int8)  # the identity and a skew conference matrix
        signs[1:, 1:] = _residues(*found) + torch.eye(field, dtype=torch.int8)
        signs[1:, 0] = -1
        return signs
    field = order // 2 - 1
    if order % 4 == 0 and field % 4 == 1 and (found := _prime_power(field)) is not None:
        conference = torch.ones(field + 1, field + 1, dtype=torch.int8)
        conference[0, 0] = 0
        conference[1:, 1:] = _residues(*found)
        one = torch.eye(field + 1, dtype=torch.int8)
        plus, minus = torch.tensor([[1, 1], [1, -1]]), torch.tensor([[1, -1], [-1, -1]])
        return (torch.kron(conference, plus) + torch.kron(one, minus)).to(torch.int8)
    return None


def _prime_power(number: int) -> tuple[int, int] | None:
    """(p, k) with p^k = number, or None."""
    if number < 2:
        return None
    prime = next((d for d in range(2, int(number**0.5) + 1) if number % d == 0), number)
    power = 0
    while number % prime == 0:
        number //= prime
        power += 1
    return (prime, power) if number == 1 else None


def _residues(prime: int, power: int) -> Tensor:
    """[q, q] int8: at (a, b) whether a - b is a square in the field of q = prime^power: 1, -1, or 0 for a = b."""
    elements = list(product(range(prime), repeat=power))  # coefficients of polynomials, the highest first
    number = {element: index for index, element in enumerate(elements)}
    character = torch.zeros(len(elements), dtype=torch.int8)
    for exponent, element in enumerate(_powers(prime, power)):
        character[number[element]] = -1 if exponent % 2 else 1  # squares are the even powers of a generator
    digits = torch.tensor(elements)
    weights = torch.tensor([prime ** (power - 1 - place) for place in range(power)])
    difference = (digits.unsqueeze(1) - digits.unsqueeze(0)) % prime
    return character[(difference * weights).sum(dim=2)]


def _powers(prime: int, power: int) -> list[tuple[int, ...]]:
    """Every element of the field but 0, as the powers of x from 0 on, for the first m that makes x a generator.

    Polynomials of fewer than `power` + 1 terms over the numbers modulo `prime`, with x^power = m. If x passes through
    all of them but 0 before it comes back to 1, each has an inverse, so that this is the field.
    """
    one = (*(0,) * (power - 1), 1)
    for modulus in product(range(prime), repeat=power):
        powers, element = [one], _times_x(one, modulus, prime)
        while element != one and len(powers) < prime**power:
            powers.append(element)
            element = _times_x(element, modulus, prime)
        if len(powers) == prime**power - 1:
            return powers
    raise AssertionError("every finite field has a generator")


def _times_x(element: tuple[int, ...], modulus: tuple[int, ...], prime: int) -> tuple[int, ...]:
    carry, shifted = element[0], (*element[1:], 0)
    return tuple((value + carry * reduced) % prime for value, reduced in zip(shifted, modulus, strict=True))
