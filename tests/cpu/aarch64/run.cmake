# SPDX-License-Identifier: Apache-2.0
# Cross-compiles the digest in SOURCE with COMPILER, under WORK; with an EMULATOR it must print what the NATIVE one does.
if(NOT COMPILER)
  message("skipped: no aarch64-linux-gnu-g++ (Debian package g++-aarch64-linux-gnu)")
  return()
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK} -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release
                        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=${COMPILER}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK} --target cpu_digest COMMAND_ERROR_IS_FATAL ANY)
if(NOT EMULATOR)
  message("not run: no qemu-aarch64 (Debian package qemu-user)")
  return()
endif()
execute_process(COMMAND ${NATIVE} OUTPUT_VARIABLE native COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${EMULATOR} ${WORK}/cpu_digest OUTPUT_VARIABLE emulated COMMAND_ERROR_IS_FATAL ANY)
if(NOT native STREQUAL emulated)
  message(FATAL_ERROR "the digest on this machine is ${native}on aarch64 ${emulated}")
endif()
