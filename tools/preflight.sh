#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# preflight.sh <goal> <python> <venv>: names everything that the goal needs and this machine lacks, at once, each with
# its Debian package. The goal is one of
# the Makefile's. With <venv> = system, <python> must have torch.
goal=$1 python=$2 venv=$3
missing="" packages=""

lacks() {  # lacks <what> <Debian package>
  missing="$missing
  - $1: $2"
  packages="$packages $2"
}

at_least() {  # at_least <version> <wanted>
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

tool() {  # tool <program> <Debian package>
  command -v "$1" >/dev/null 2>&1 || lacks "$1" "$2"
}

need_compiler() {
  # What CMake will call: $CXX, else c++.
  compiler=${CXX:-c++}
  if ! command -v "${compiler%% *}" >/dev/null 2>&1; then
    lacks "C++ compiler with C++20 (g++ 12 or newer)" "g++"
  elif ! $compiler --version | grep -qi clang; then
    version=$($compiler -dumpfullversion -dumpversion)
    at_least "$version" 12 || lacks "g++ 12 or newer, got $version" "g++-12"
  fi
}

need_cmake() {
  if ! command -v cmake >/dev/null 2>&1; then
    lacks "CMake 3.25 or newer" "cmake"
  else
    version=$(cmake --version | sed -n 's/^cmake version //p')
    at_least "$version" 3.25 || lacks "CMake 3.25 or newer, got $version" "cmake"
  fi
  tool ninja ninja-build
}

need_python() {
  if ! "$python" -c 'pass' >/dev/null 2>&1; then
    lacks "Python 3.10 or newer with its venv module ($python)" "python3 python3-venv"
    return
  fi
  version=$("$python" -c 'import platform; print(platform.python_version())')
  at_least "$version" 3.10 || lacks "Python 3.10 or newer, got $version" "python3"
  if [ "$venv" = system ]; then
    "$python" "$(dirname "$0")/../cmake/locate_torch.py" >/dev/null 2>&1 ||
      lacks "PyTorch in $python, which VENV=system asks for" "none is new enough, pip install torch, or leave VENV out"
  else
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || lacks "Python's venv module" "python3-venv"
  fi
}

need_python_headers() {  # the package is built with them, and torch.compile compiles against them
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1 ||
    lacks "Python headers (Python.h) of $python" "python3-dev"
}

need_googletest() {
  echo '#include <gtest/gtest.h>' | ${CXX:-c++} -x c++ -E - >/dev/null 2>&1 ||
    [ -e /usr/include/gtest/gtest.h ] || lacks "GoogleTest" "libgtest-dev"
}

need_clang_tools() {
  tool clang-format clang-format
  tool clang-tidy clang-tidy
}

case $goal in
  build | demo | bench) need_compiler; need_cmake; need_python; need_python_headers ;;
  test-gpu)
    need_compiler; need_cmake; need_python; need_python_headers
    [ "$venv" = system ] || need_googletest ;;
  test)
    need_compiler; need_cmake; need_python; need_python_headers
    # A machine without a registry may lack these: tests/run.py then counts what needs them as skipped.
    [ "$venv" = system ] || { need_googletest; need_clang_tools; } ;;
  report) need_python ;;
  lint) need_compiler; need_cmake; need_python; need_clang_tools ;;
  format) need_python; tool clang-format clang-format ;;
  sanitize) need_compiler; need_cmake; need_googletest ;;
  *) echo "preflight.sh: unknown goal $goal" >&2; exit 2 ;;
esac

if [ -n "$missing" ]; then
  printf 'make %s needs what this machine lacks (what: Debian package):%s\n' "$goal" "$missing" >&2
  [ "$venv" = system ] || printf 'On Debian or Ubuntu: apt-get install%s\n' "$packages" >&2
  exit 1
fi
