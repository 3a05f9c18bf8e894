# SPDX-License-Identifier: Apache-2.0
# What every target of the project has in common.
include_guard()

# Arithmetic is pinned: a * b + c rounds twice on every instruction set and every device. nvcc contracts by default,
# and so does GCC. GCC 12's SLP vectorizer drops the rounding of two neighbouring double -> float -> double conversions:
# struct S { double a, b; }; void f(S s, S* o) { *o = {(float)s.a, (float)s.b}; } converts nothing at -O3.
# CMake 3.25 knows no C++20 for nvcc, so its option is spelled out.
function(steadynorm_target_properties target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-fno-tree-slp-vectorize>
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -fmad=false -Xcompiler=-ffp-contract=off>)
  # No path of the build machine in a binary: __FILE__ and debug information start at the tree. The last one wins.
  foreach(map "${PROJECT_SOURCE_DIR}=." "${PROJECT_BINARY_DIR}=build")
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${map}>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${map}>)
  endforeach()
  # A kernel that spills registers is a bug: ptxas warns of it, and with warnings as errors the build stops.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills,--warn-on-local-memory-usage>)
  if(PROJECT_IS_TOP_LEVEL)
    # nvcc's own generated host code does not survive -Wpedantic. GCC only guesses at maybe-uninitialized, and wrongly
    # for a buffer that one branch fills and the other does not return.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wno-maybe-uninitialized>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-maybe-uninitialized>)
  endif()
  if(STEADYNORM_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xptxas=--warning-as-error>)
  endif()
endfunction()

# steadynorm_library(<name> <source>...): the static library steadynorm_<name>, known to users as steadynorm::<name>.
function(steadynorm_library name)
  add_library(steadynorm_${name} STATIC ${ARGN})
  add_library(steadynorm::${name} ALIAS steadynorm_${name})
  set_target_properties(steadynorm_${name} PROPERTIES EXPORT_NAME ${name})
  steadynorm_target_properties(steadynorm_${name})
endfunction()
